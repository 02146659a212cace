"""Sample text from a checkpoint: `python -m experiments.generate RUN --prompt "def " --tokens 300`.

Text is printed as it is made. Ctrl-C ends it, with status 130.
"""

import argparse
import json
from pathlib import Path

from experiments.analysis.sampling import Sampler
from experiments.cli import command
from experiments.errors import UserError, require


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m experiments.generate", description=__doc__.split(":")[0] + "."
    )
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/demo/fst")
    parser.add_argument("--prompt", help="text to continue (default: 'def ')")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="texts to continue, one a line; of a .jsonl file the field `prompt` of each line, and then a "
        "line of JSON with `prompt` and `text` is printed for each",
    )
    parser.add_argument("--tokens", type=int, default=300, help="tokens at most (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first prompt; each has the next one (default: %(default)s)",
    )
    parser.add_argument(
        "--to-end", action="store_true", help="stop where the model ends a document, before all tokens"
    )
    parser.add_argument(
        "--sparse",
        action=argparse.BooleanOptionalAction,
        help="use the sparse products, with masks of the weights as they are, or dense ones (default: sparse "
        "where the last step was by sparse weights)",
    )
    args = parser.parse_args(argv)
    require(args.tokens > 0, f"--tokens must be positive, got {args.tokens}.")
    require(args.temperature >= 0, f"--temperature must not be negative, got {args.temperature}.")
    require(args.prompt is None or args.prompts is None, "Give --prompt or --prompts, not both.")
    prompts = read(args.prompts) if args.prompts else ["def " if args.prompt is None else args.prompt]
    most = 2**32 - len(prompts)  # of larger ones the lower 32 bits count alone
    require(0 <= args.seed <= most, f"--seed must lie in 0 to {most}, got {args.seed}.")
    for prompt in prompts:
        check(prompt)
    sampler = Sampler(args.run, args.sparse)
    options = {"tokens": args.tokens, "temperature": args.temperature, "to_end": args.to_end}
    for number, prompt in enumerate(prompts):
        parts = sampler(prompt, seed=args.seed + number, **options)
        if args.prompts and args.prompts.suffix == ".jsonl":
            print(json.dumps({"prompt": prompt, "text": "".join(parts)}, ensure_ascii=False), flush=True)
            continue
        if number:
            print(f"\n{'-' * 20}\n")
        print(prompt, end="", flush=True)
        try:
            for part in parts:
                print(part, end="", flush=True)
        finally:
            print(flush=True)


def check(prompt: str) -> None:
    """UserError for a prompt that is no text, as Python marks it with surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The prompt {prompt!r:.80} is no UTF-8. Write it in UTF-8.") from error


def read(path: Path) -> list[str]:
    """The prompts of a file. Raises UserError where there are none."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts: {path} is no file of text ({error}).") from error
    require(bool(lines), f"--prompts: {path} has no line.")
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)["prompt"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number}, is no JSON object with a field 'prompt'.") from error
        require(isinstance(prompts[-1], str), f"{path}, line {number}: the field 'prompt' must be a text.")
    return prompts


if __name__ == "__main__":
    main()
