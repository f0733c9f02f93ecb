"""Lists the blocks of each prefix store once, when the store appears. This finds prefixes that earlier orchestrators
have cached.

Called by `orchestrator.dispatch.attempt`; writes to `orchestrator.placement.prefix_index`. Requests do not wait for the
list of a store. Until it arrives, prompts are computed as if the store were empty. Runs on the event loop.
"""

import asyncio
import logging

from baton.errors import BatonError
from orchestrator.membership.members import Membership
from orchestrator.membership.view import Group, PrefillGroup
from orchestrator.placement.block_fetches import endpoint_of
from orchestrator.placement.prefix_index import PrefixIndex
from orchestrator.workers.client import Clients

logger = logging.getLogger(__name__)


class PrefixStores:
    """Keeps the prefix index in line with the prefix stores. Adds the blocks of new stores, and removes stores that no
    longer exist."""

    def __init__(self, members: Membership, clients: Clients, index: PrefixIndex) -> None:
        self._members = members
        self._clients = clients
        self._index = index
        self._asked: dict[str, asyncio.Task[None]] = {}
        """Task that lists the blocks of a store, by name of the store. Finished tasks are kept, so that each store is
        listed once."""

    def look(self) -> None:
        """Start tasks that list the blocks of new stores. Remove from the index all stores that no longer exist. Called
        for every request. Stores of drained groups are included, because other nodes may fetch from them."""
        groups = [group for group in self._members.present.groups if group.prefix_store]
        stores = {group.prefix_store for group in groups}
        self._index.keep_only(stores)
        for store in self._asked.keys() - stores:
            self._asked.pop(store).cancel()
        for group in groups:
            if group.prefix_store not in self._asked and group.ready:
                self._asked[group.prefix_store] = asyncio.create_task(self._ask(group))

    async def close(self) -> None:
        """Cancel all running tasks that list blocks, and wait until they have ended."""
        for asking in self._asked.values():
            asking.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)

    async def _ask(self, group: Group) -> None:
        """List the blocks of this group's prefix store by a call to the group, and add them to the index."""
        try:
            with self._clients.use(endpoint_of(group)) as worker:
                names = await worker.prefix_blocks(is_prefill=isinstance(group, PrefillGroup))
        except BatonError as error:
            logger.info("%s does not say what it has cached: %s", group.name, error)
        else:
            self._index.add(group.prefix_store, names)
