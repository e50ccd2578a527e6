"""aatc eval offline-speed: collect and whiten of a geometry, with random weights and random text."""

from __future__ import annotations

import torch

from aatc_cli.artifacts.versions import versions
from aatc_cli.errors import UsageError
from aatc_cli.evals import Task
from aatc_cli.evals.call import Call
from aatc_cli.evals.keeping import kept
from aatc_cli.evals.offline_speed.settings import Settings
from aatc_cli.evals.speed.result import Result, draft_of_profile
from aatc_cli.evals.subjects import device_name
from aatc_cli.models.loading import pick_dtype
from aatc_cli.models.placement import find_device
from aatc_cli.studies.offline_times import measure_offline


def offline_speed(task: Task, call: Call, settings: Settings) -> list[Result]:
    """The times of a profile's geometry at every size, written into one file; raises as `measure_offline` does."""
    profile, options = call.profile, call.options
    if profile is None:
        raise UsageError("offline-speed is of a profile's geometry", "give --profile")
    find_device(options.device)
    protocol = {
        "task": task.name,
        "profile": profile.name,
        "geometry": profile.geometry.model_dump(mode="json"),
        "context": list(settings.context),
        "batch": list(settings.batch),
        "repeats": settings.repeats,
        "device": device_name(options.device),
        "dtype": str(pick_dtype(options.device, options.dtype)),
        "threads": torch.get_num_threads(),
        "versions": {name: versions()[name] for name in ("aatc", "torch", "transformers")},
    }
    draft = draft_of_profile("offline-stages", None, protocol, None)
    sizes = [(context, batch) for context in settings.context for batch in settings.batch]

    def measured() -> Result:
        timed = measure_offline(profile, sizes, settings.repeats, options)
        return timed.model_copy(update={"protocol": protocol})

    what = f"speed of the offline stages of {profile.name}"
    return [kept(call.run.evals, draft, what, force=options.force, measured=measured)]
