"""Settings of speed that have an automatic value: they change how a model computes, not what."""

from __future__ import annotations

import warnings
from typing import Literal, TypeAlias

from agentspec.errors import ModelLoadError, check_option

Switch: TypeAlias = bool | Literal["auto"]
"""On, off, or ``"auto"``: wherever it can be done."""

SWITCHES: tuple[Switch, ...] = ("auto", True, False)


def replace_compile(
    compile: Switch | None, cuda_graphs: Switch, native_kernels: Switch, stacklevel: int = 3
) -> tuple[Switch, Switch]:
    """Return ``cuda_graphs`` and ``native_kernels``, both as the old ``compile`` has them where that is given.

    Args:
        compile: None where it is not given; True is "auto" now. It goes in the release after 0.2.
        cuda_graphs: whether passes are captured on CUDA.
        native_kernels: whether kernels are compiled on a CPU.
        stacklevel: of the ``DeprecationWarning``.

    Raises:
        ModelLoadError: for ``compile`` beside one of the others, or a value that is no switch.
    """
    if compile is not None:
        check_option("compile", compile, SWITCHES)
        if (cuda_graphs, native_kernels) != ("auto", "auto"):
            raise ModelLoadError("compile is cuda_graphs and native_kernels now; expected these without it, got both.")
        warnings.warn(
            "compile is two settings now: cuda_graphs (on CUDA) and native_kernels (on a CPU).",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        cuda_graphs = native_kernels = False if compile is False else "auto"
    check_option("cuda_graphs", cuda_graphs, SWITCHES)
    check_option("native_kernels", native_kernels, SWITCHES)
    return cuda_graphs, native_kernels
