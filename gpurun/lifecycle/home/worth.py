"""Which finished files are worth most, and which are not worth the paid minutes that bringing them takes."""

from __future__ import annotations

from gpurun.machine.answers import Manifest, ManifestFile

# The files of a checkpoint. Without the state the weights are of little use; the optimiser is needed only to go on.
RANK = {"state": 0, "weights": 1, "optimizer": 2}


def newest(manifest: Manifest) -> list[ManifestFile]:
    """The files of the latest checkpoint."""
    return [file for file in manifest.files if file.kind in RANK and file.step == manifest.latest]


def wanted(manifest: Manifest) -> list[ManifestFile]:
    """What is to come home, the worthiest first: the latest checkpoint, the best, samples and compile caches."""
    rest = {file.name for file in spare(manifest)}
    best = manifest.best.step if manifest.best else None

    def place(file: ManifestFile) -> tuple[int, int, int, str]:
        group = 2 if file.kind not in RANK else 0 if file.step == manifest.latest else 1 if file.step == best else 3
        return group, -file.step, RANK.get(file.kind, 0), file.name

    return sorted((file for file in manifest.files if file.name not in rest), key=place)


def spare(manifest: Manifest) -> list[ManifestFile]:
    """What the trainer keeps only in case the latest checkpoint is damaged: the one before, unless it is the best."""
    if not newest(manifest):
        return []
    needed = {manifest.latest, manifest.best.step if manifest.best else None}
    return [file for file in manifest.files if file.kind in RANK and file.step not in needed]
