"""The lowest layer: errors, records, money, time, paths, settings, secrets. It imports no other package of gpurun."""
