"""Starts one prefill rank in the calling process: loads its model and runs its server.

Called by `deploy.groups.hosting` in a child process or in a Ray actor; this module depends on neither. Starts
`prefill_workers.servicer`. Runs on the event loop of the process.
"""

import asyncio
from functools import partial

from baton.modeling.hosting import LoadedModel, prefix_place
from baton.modeling.prefix_store.folder import sweep
from baton.planning.device_profile import DeviceProfile
from baton.process.clock import SystemClock
from baton.process.own_thread import in_own_thread
from baton.settings.place import WorkerPlace
from baton.text.grammars import Grammars
from prefill_workers.config import PrefillConfig
from prefill_workers.engine import PrefillEngine
from prefill_workers.servicer import PrefillServer


async def start_rank(
    place: WorkerPlace, config: PrefillConfig, model: LoadedModel | None = None, profile: DeviceProfile | None = None
) -> PrefillServer:
    """Start the server of a rank, and return it when it is serving. Loads the model first, unless `model` is given. The
    rank reports `profile`, the profile of its device. Raises ModelError or ConfigError with a one-line message."""
    decoder = await in_own_thread(partial((model or LoadedModel()).load, place))
    prefixes = prefix_place(place)
    server = await PrefillServer.start(
        PrefillEngine(decoder, SystemClock(), config, crash_note=place.crash_note),
        place,
        prefixes=prefixes,
        may_share=config.transfer == "auto",
        grammars=Grammars.of_folder(place.model_folder, decoder.config.eos_token_ids),
        profile=profile,
    )
    await asyncio.to_thread(sweep)  # after this process's own folder was marked as in use
    return server
