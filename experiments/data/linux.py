"""The source of the Linux kernel, from a folder or a tarball such as Debian's package linux-source has.

Source code of some 800 MB, whose losses compare with no other text's. Two filters leave out what is generated
and would flatter a loss: a folder of register tables, and files that compress very well or are mostly
hexadecimal digits. Whole folders are held out for validation, since neighbouring drivers are near-copies.
"""

import dataclasses
import hashlib
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from experiments.data import base
from experiments.data.prepared import prepared, sources
from experiments.data.text import TextConfig, TextFiles, fingerprint, pieces, share_of
from experiments.errors import UserError, require

SUFFIXES = {".c", ".h", ".S", ".rst", ".dts", ".dtsi", ".sh", ".py", ".pl", ".txt", ".rs"}
TABLES = "drivers/gpu/drm/amd/include/"  # a third of all, generated
LARGE = 4096  # bytes: smaller files are kept whatever they hold
RATIO, DIGITS = 8.0, 0.42  # most that zlib's first level may win, most that hexadecimal digits may take
NO_DIGIT = bytes(set(range(256)) - set(b"0123456789abcdefABCDEFx"))
DEPTH = 3  # folders, such as drivers/net/ethernet, that are held out whole


@dataclasses.dataclass(frozen=True)
class Config(base.Config):
    """Where the source is, and how much of it is held out."""

    source: str = "/usr/src"
    """folder of a kernel, its tarball (.tar, .tar.gz, .tar.xz), or a folder with such a tarball; Debian's is
    in /usr/src after `apt-get install linux-source`"""
    folders: tuple[str, ...] = ()
    """folders of the kernel to take, such as fs or drivers/net; none for all"""
    piece: int = 65536
    """bytes of a record at most"""
    validation: float = 0.05
    """share of the folders for validation"""

    def __post_init__(self):
        super().__post_init__()
        require(self.piece > 0, f"data.piece must be positive, got {self.piece}.")
        require(0 < self.validation < 1, f"data.validation is a share in (0, 1), got {self.validation}.")

    def records(self) -> base.Records:
        """The prepared source. Raises UserError where there is none."""
        place = found(Path(self.source).expanduser().resolve())
        files = taken_of(place) if place.is_dir() else [""]
        content = f"{fingerprint(place, files)}\0{self.piece}\0{self.validation}"
        content += "".join(f"\0{folder}" for folder in self.folders)
        name = f"{place.name.split('.tar')[0]}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        config = LinuxConfig(
            name=name,
            folder=str(place),
            piece=self.piece,
            validation=self.validation,
            folders=tuple(f"{folder.strip('/')}/" for folder in self.folders),
        )
        root = str(Path(self.root).resolve())
        builder = prepared(lambda: LinuxText(data_dir=root, config=config), f"linux: reading {place}")
        return base.Records("linux", **sources(builder), fingerprint=name, folder=Path(builder.data_dir))


def found(place: Path) -> Path:
    """The folder or the tarball of a kernel. Raises UserError if there is none."""
    if place.is_dir() and not (place / "Kbuild").exists():
        tarballs = sorted(place.glob("linux-*.tar*"))
        require(
            bool(tarballs),
            f"{place} has neither the source of Linux (Kbuild) nor a tarball of it (linux-*.tar.xz). On "
            "Debian `apt-get install linux-source` brings one, elsewhere kernel.org; "
            "then --data.source PATH.",
        )
        return tarballs[-1]
    require(
        place.exists(),
        f"data.source {str(place)!r} does not exist. Give a tarball of kernel.org, a folder of the source, "
        "or leave it out for the one that Debian's linux-source puts into /usr/src.",
    )
    require(
        place.is_dir() or tarfile.is_tarfile(place),
        f"data.source {place} is neither a folder nor a tarball. Give a tarball of kernel.org, or the folder "
        "into which it was unpacked.",
    )
    return place


@dataclasses.dataclass(eq=False)
class LinuxConfig(TextConfig):
    """Where the source is, what of it is taken, and the share that is held out."""

    folders: tuple[str, ...] = ()
    validation: float = 0.05


class LinuxText(TextFiles, skip_registration=True):
    """Files of the Linux kernel: records {"text": bytes, "path": bytes}, splits train and validation."""

    def _generate_examples(self, split):
        config, any_file = self.builder_config, False
        for file, text in files_of(Path(config.folder)):
            if config.folders and not file.startswith(config.folders):
                continue
            held_out = share_of(folder_of(file).encode()) < config.validation
            if held_out == (split == "validation") and is_written(text):
                for start, piece in pieces(text, config.piece):
                    any_file = True
                    yield f"{file}:{start}", {"text": piece, "path": file}
        if not any_file:
            raise UserError(
                f"{config.folder} has no source files for {split}: is it the source of Linux, whole? "
                "--data.folders may also name too few of its folders."
            )


def folder_of(file: str) -> str:
    """The folder that is held out whole or not."""
    return "/".join(PurePosixPath(file).parent.parts[:DEPTH])


def is_written(text: bytes) -> bool:
    """Whether a file looks written rather than generated."""
    if len(text) <= LARGE:
        return True
    digits = len(text.translate(None, delete=NO_DIGIT))
    return digits <= DIGITS * len(text) and len(text) <= RATIO * len(zlib.compress(text, 1))


def is_taken(file: str) -> bool:
    return PurePosixPath(file).suffix in SUFFIXES and not file.startswith(TABLES)


def taken_of(folder: Path) -> list[str]:
    """The files of an unpacked kernel that are taken, relative and sorted."""
    files = ((path, path.relative_to(folder).as_posix()) for path in folder.rglob("*"))
    return sorted(f for path, f in files if is_taken(f) and path.is_file() and not path.is_symlink())


def files_of(source: Path) -> Iterator[tuple[str, bytes]]:
    """The path within the kernel, and the text, of every file that is taken and is not empty."""
    if source.is_dir():
        for file in taken_of(source):
            if text := (source / file).read_bytes():
                yield file, text
        return
    with tarfile.open(source, "r|*") as archive:  # read from its start to its end
        for member in archive:
            file = re.sub(r"^(\./)?[^/]+/", "", member.name)
            if member.isfile() and is_taken(file) and (text := archive.extractfile(member).read()):
                yield file, text
