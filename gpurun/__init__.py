"""gpurun rents a GPU under a hard dollar cap, trains, and proves that the machine is gone."""

__version__ = "0.1.0"
