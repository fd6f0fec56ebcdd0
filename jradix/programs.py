"""Keeps compiled programs, each compiled when it is first asked for, and refuses new ones where none may come."""

from typing import Any

import jax

from jradix.mirror import Mirror

type ProgramName = tuple[Any, ...]
"""What a program does, and what is static about it."""


class UnplannedCompilationError(RuntimeError):
    """A step needed a program that the warm-up had not compiled, in an engine told to be strict about that."""


class Programs:
    """Compiled programs by name.

    Attributes:
        compiled: the programs so far.
        compiler_options: XLA's, for programs still to be compiled.
        sealed: no more may be compiled.
    """

    def __init__(self, compiler_options: dict[str, Any], mirror: Mirror) -> None:
        self.compiled: dict[ProgramName, jax.stages.Compiled] = {}
        self._mirror = mirror
        self.compiler_options = compiler_options
        self.sealed = False

    def compile(self, name: ProgramName, jitted: jax.stages.Wrapped, *args: Any) -> jax.stages.Compiled:
        """The program of this name; a new one is compiled for arguments like these, or for their shapes.

        Only within a mirrored call: what one of several processes launches alone waits for the others for ever.
        """
        assert self._mirror.depth, f"{name} is not compiled and launched by a mirrored call"
        if name not in self.compiled:
            if self.sealed:
                raise UnplannedCompilationError(f"{' '.join(map(str, name))} was not compiled by the warm-up")
            self.compiled[name] = jitted.lower(*args).compile(self.compiler_options)
        return self.compiled[name]

    def launch(self, name: ProgramName, jitted: jax.stages.Wrapped, *args: Any) -> Any:
        """Dispatch the program of this name, and return its results at once."""
        return self.compile(name, jitted, *args)(*args)
