"""Tables in Markdown: rows of cells, all texts, the first row the header."""


def markdown(lines, numbers: bool = True) -> str:
    """A table that is aligned, so that it also reads well as plain text.

    numbers: whether all columns but the first are to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [numbers and column > 0 for column in range(len(widths))]
    rule = ["-" * (width - 1) + "-:"[end] for width, end in zip(widths, right, strict=True)]
    return _rows(
        [
            cell.rjust(width) if end else cell.ljust(width)
            for cell, width, end in zip(line, widths, right, strict=True)
        ]
        for line in [lines[0], rule, *lines[1:]]
    )


def loose(lines) -> str:
    """A table with cells of any length, which are not aligned."""
    return _rows([lines[0], ["---"] * len(lines[0]), *lines[1:]])


def _rows(lines) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
