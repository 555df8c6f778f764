"""What a program in the sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headwater.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program in the sandbox may use, all of its processes together where nothing else is said.

    seconds        of the clock, for one call, one run of a script, or for loading a program
    total_seconds  of the clock, for all tests of one program; also of the processor, for each process
    memory         MiB, resident; for each process, of address space
    processes      at once, threads included
    file           MiB, for each file, and for the temporary folder as a whole
    output         bytes of printed text that are kept; the rest is read and thrown away
    value          bytes of one value that goes in or comes out, written down
    """

    seconds: float = 5.0
    total_seconds: float = 30.0
    memory: int = 1024
    processes: int = 32
    file: int = 16
    output: int = MIB
    value: int = 4 * MIB

    def __post_init__(self) -> None:
        for field in fields(self):
            found = getattr(self, field.name)
            if not 0 < found < float("inf"):
                raise ConfigError(f"The sandbox's limit '{field.name}' is {found}, wanted a number above 0.")
        if self.memory < 64:
            raise ConfigError(f"The sandbox's limit 'memory' is {self.memory} MiB; Python itself needs 64.")
