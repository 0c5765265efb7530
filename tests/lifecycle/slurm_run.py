"""What test_slurm_run.py and other tests share."""

from __future__ import annotations

from gpurun.core.run_plan import Lease

LEASE = Lease(boot_s=20, ship_s=20, train_s=60, collect_s=20, destroy_s=20, kill_allowance_s=60, queue_s=600)


KILLS = ("create.intended", "create.observed", "ready.observed", "train.started", "death.read")
