"""What runs must have in common where their times are compared, by their records."""

from dataclasses import dataclass

from experiments.ablations import together

RULE = (
    "Times are compared between runs of one commit, trained with its own files, with the same versions of "
    "jax and cuSPARSELt, the same XLA flags and the same kind and number of GPUs, as far as these are "
    "recorded."
)


@dataclass(frozen=True)
class Built:
    """What the times of a run depend on besides its config.

    commit: of its code; where none is known, one of its own.
    libraries: (name, version) of jax, and of cuSPARSELt where that is recorded.
    flags: those of the environment by which XLA compiles in another way, where they are recorded.
    devices: what they call themselves.
    changed: whether files differed from the commit."""

    commit: str
    libraries: tuple[tuple[str, str], ...]
    flags: str
    devices: tuple[str, ...]
    changed: bool

    @classmethod
    def of(cls, member: together.Member) -> "Built":
        """What the record of a run says of it."""
        environment = member.environment
        libraries = {
            name: str(version)
            for name, version in (environment.get("packages") or {}).items()
            if name in ("jax", "jaxlib") or "cusparselt" in name.lower()
        }
        return cls(
            str(environment.get("commit") or f"unknown, of {member.path}"),
            tuple(sorted(libraries.items())),
            str((environment.get("flags") or {}).get("XLA_FLAGS", "")),
            tuple(member.devices),
            environment.get("tree") not in (None, "clean"),
        )

    def unlike(self, other: "Built") -> list[str]:
        """In what another differs, in words."""
        libraries = sorted({name for name, _ in set(self.libraries) ^ set(other.libraries)})
        gpus = "another kind of GPU" if set(self.devices) != set(other.devices) else "another number of GPUs"
        return [
            *(["another commit"] if self.commit != other.commit else []),
            *(f"another version of {name}" for name in libraries),
            *(["other XLA flags"] if self.flags != other.flags else []),
            *([gpus] if self.devices != other.devices else []),
        ]
