"""What Megatron-Core imports and a CPU on Python 3.11 lacks. Import this before `megatron`.

Nothing of `install` runs while a checkpoint is loaded: Triton kernels are only *defined* at import, `typing.override`
(3.12) only marks a method, and what `torch.compile` would compile belongs to layers. Models and optimizers need
`install_runtime` too: they ask for the current GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import typing
import warnings

import torch


class _Inert:
    """Stands for any name of Triton; as a decorator it leaves the kernel as it is."""

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def _leave_uncompiled(function: typing.Any = None, **_: typing.Any) -> typing.Any:
    return function if function is not None else lambda later: later


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert()


def install() -> None:
    """Puts the stand-ins in place of what is absent; whatever is really there stays."""
    if not hasattr(typing, "override"):
        vars(typing)["override"] = lambda method: method
    if importlib.util.find_spec("triton") is None:
        triton, language = _InertModule("triton"), _InertModule("triton.language")
        vars(triton).update(language=language, __version__="3.4.0")
        sys.modules.update({"triton": triton, "triton.language": language})
        vars(torch)["compile"] = _leave_uncompiled  # its real one would look for Triton's compiler
    # Each of its modules warns that an accelerated implementation (Transformer Engine, Apex) is absent.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")


def install_runtime() -> None:
    """Lets models and optimizers that ask for a GPU have the CPU: after `install`, before `megatron`."""
    cuda = vars(torch.cuda)
    cuda["current_device"] = lambda: "cpu"
    cuda["synchronize"] = lambda *_: None
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange"):
        vars(torch)[name] = _on_cpu(getattr(torch, name))
    named = torch.Tensor.type
    torch.Tensor.type = (  # type: ignore[method-assign]
        lambda self, *to, **options: (
            named(self, *to, **options)
            if to or options
            else typing.cast(str, named(self)).replace("torch.", "torch.cuda.")
        )
    )
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _on_cpu(make: typing.Any) -> typing.Any:
    @functools.wraps(make)
    def made(*args: typing.Any, **options: typing.Any) -> typing.Any:
        if "cuda" in str(options.get("device", "")):
            options["device"] = "cpu"
        return make(*args, **options)

    return made
