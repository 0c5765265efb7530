"""The source of a fake torch with CUDA: the part that the agent's survey of a machine uses, with any values."""

from __future__ import annotations

_SOURCE = """
import sys, time
time.sleep({import_s})
{first}
__version__ = {version!r}
float32, bfloat16 = "torch.float32", "torch.bfloat16"

class version:
    cuda, hip = {built_for!r}, None

class _Device:
    name, total_memory, uuid = {card!r}, {memory_bytes}, "one"
    major, minor = {capability}

class _Tensor:
    def __matmul__(self, other):
        if {kernel!r}:
            raise RuntimeError({kernel!r})
        return self
    def __eq__(self, other):
        return self
    cpu = float = flatten = lambda self: self
    all = lambda self: {is_right}
    tolist = lambda self: [64.0, 63.5]

ones = lambda *size, device, dtype: _Tensor()

class cuda:
    is_available = staticmethod(lambda: {devices} > 0)
    device_count = staticmethod(lambda: {devices})
    get_device_properties = staticmethod(lambda place: _Device)
    get_arch_list = staticmethod(lambda: {archs!r})
    mem_get_info = staticmethod(lambda place: ({free_bytes}, {memory_bytes}))
    synchronize = staticmethod(lambda place: None)

    @staticmethod
    def init():
        if {init!r}:
            print("UserWarning: CUDA initialization:", {init!r}, file=sys.stderr)
            raise RuntimeError({init!r})
"""


def torch_source(
    card: str = "NVIDIA A100 80GB PCIe",
    memory_gb: float = 85,
    *,
    version: str = "2.13",
    devices: int = 1,
    built_for: str | None = "12.8",
    capability: tuple[int, int] = (8, 0),
    archs: tuple[str, ...] = ("sm_80", "sm_90"),
    free_gb: float | None = None,
    init: str = "",
    kernel: str = "",
    is_right: bool = True,
    import_s: float = 0,
    first: str = "",
) -> str:
    """Return the text of `torch/__init__.py`.

    `init` is the error of initialising CUDA and `kernel` the error of the first kernel; an empty text means no error.
    `first` is code that runs on import.
    """
    free_bytes = int((memory_gb if free_gb is None else free_gb) * 1e9)
    return _SOURCE.format(
        card=card, memory_bytes=int(memory_gb * 1e9), version=version, devices=devices, built_for=built_for,
        capability=capability, archs=list(archs), free_bytes=free_bytes, init=init, kernel=kernel, is_right=is_right,
        import_s=import_s, first=first,
    )  # fmt: skip
