"""Operations on groups for operators and the autoscaler: drain a group, start a group, or move a worker to the other
role (flip). Each call waits until its change is complete.

Served over gRPC by `orchestrator.api.admin`, and used by `orchestrator.actuation.actuator`. Runs on the asyncio loop.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from baton.calls.cluster_state import GroupState
from baton.errors import NotFoundError, UnavailableError
from orchestrator.membership.members import Membership
from orchestrator.workers.worker_poller import WorkerPoller

logger = logging.getLogger(__name__)

_POLL_S = 0.5
"""Maximum pause in seconds between two checks of a group that is being drained or started. The pause ends early if the
state of the group changes."""

Check = Callable[[str], None]
"""Function that takes the name of a group, and raises an error if this group must not be drained."""


class GroupOperations:
    """Operations on groups. A method records an order for a group, such as a drain, and waits until the supervisor has
    carried it out."""

    def __init__(self, members: Membership, poller: WorkerPoller) -> None:
        self._members = members
        self._poller = poller

    async def drain(self, name: str, *, leave: bool, returns: bool = False) -> AsyncGenerator[GroupState, None]:
        """Give a group no new work. Yield the state of the group at the start, and whenever the state has changed.

        If `leave` is False, the generator ends when the group has no work left and the supervisor has recorded the
        drain. If `leave` is True, it ends when the group's workers have been stopped. In both cases, it also ends if
        the group is undrained. If `leave` is True and the group has borrowed its worker from a group of the other role
        (`flip`), the worker is returned to that group instead of being stopped. `returns`: True if the caller will
        later start this group or a replacement of it. In this case, requests that no other group can serve wait during
        the drain instead of failing.

        Raises NotFoundError for an unknown name, and UnavailableError if `leave` is True and no supervisor exists that
        can stop workers.
        """
        gives_back = leave and name in self._members.orders.lent
        draining = self._give_back(name) if gives_back else self._drain(name, leave=leave)
        with self._members.returning(*((name,) if returns else ())):
            async with aclosing(draining) as states:
                async for state in states:
                    yield state

    async def _drain(self, name: str, *, leave: bool, is_brief: bool = False) -> AsyncGenerator[GroupState, None]:
        """Drain the group like `drain`. If `is_brief`, do not wait for the supervisor to record the drain, because
        another order follows."""
        self._members.drain(name)
        logger.info("draining group=%s", name)
        told: GroupState | None = None
        while True:
            await self._poller.ask()
            state, is_wanted = self._poller.group(name), name not in self._members.orders.drained
            if state is None:
                if leave and self._members.is_starting(name) and name in self._members.orders.drained:
                    self._members.dismiss(name)
                    await self._members.until(lambda: None if self._members.is_starting(name) else True, _POLL_S)
                    continue
                logger.info("drained group=%s: it is gone", name)
                return
            if state != told:
                yield state
                told = state
            if is_wanted != (name not in self._members.orders.drained):
                continue  # the order changed while the caller handled the state
            if is_wanted:
                logger.info("group=%s is wanted again", name)
                return
            if self._is_idle(state) and (is_brief or self._members.is_kept(name)):
                if not leave:
                    logger.info("group=%s is drained", name)
                    return
                self._members.dismiss(name)
            await self._members.until(partial(self._moved, name, state.num_requests), _POLL_S)

    async def undrain(self, name: str, model: str = "") -> GroupState:
        """Allow new work for a drained group again, and return its state. If the group's workers have been stopped,
        they are started first. `model`: folder of the model to start them with; empty: the model does not change.

        Returns when the group has workers and the supervisor has recorded the change. Raises NotFoundError for an
        unknown name. Raises UnavailableError if another model is requested while the group has workers. Also raises
        UnavailableError if the group cannot be started; the start is then retried with the previous model.
        """
        before = self._members.orders.models.get(name)
        self._members.undrain(name, model)
        logger.info("no longer drained group=%s", name)
        try:
            await self._until_there(name)
            while not self._members.is_kept(name):
                await self._members.until(lambda: self._members.is_kept(name) or None, _POLL_S)
            return await self._until_there(name)
        except UnavailableError:
            self._members.use_model(name, before)
            raise

    async def stand_in(self, name: str) -> GroupState:
        """Start a stand-in, which is an additional group of the same kind as group `name`, and return the stand-in's
        state. When the stand-in is drained, it is stopped and deleted.

        Raises NotFoundError for an unknown name, and UnavailableError if the group cannot be started. The stand-in is
        deleted if it cannot be started, or if the caller is cancelled.
        """
        made = self._members.stand_in(name)
        logger.info("group=%s is to stand in for group=%s", made, name)
        try:
            return await self._until_there(made)
        except BaseException:
            self._members.give_up(made)
            raise

    def flip(self, name: str) -> AsyncGenerator[GroupState, None]:
        """Move a worker of group `name` to the other role: a new group of that role borrows the worker. The worker is a
        prefill group's highest rank that is not lent yet, or a generation group's only worker. Its weights stay loaded.
        Yield the states of group `name` while it finishes its work, and finally the state of the new group.

        New requests go to other groups meanwhile, and no request is lost. If group `name` keeps other workers, it gets
        work again afterwards. If group `name` has itself borrowed its worker, the worker is returned to its owner
        instead, as by `unflip`. If the caller stops before the group is idle, the drain is withdrawn and no worker
        moves.

        Raises NotFoundError for an unknown name. Raises UnavailableError if the group has no workers, if it is the only
        group that can generate tokens, or if no supervisor exists. Also raises UnavailableError if the worker does not
        start in its new role; the worker then returns to its owner.
        """
        return self._unflip(name) if name in self._members.orders.lent else self._lend(name)

    def unflip(self, name: str) -> AsyncGenerator[GroupState, None]:
        """Undo a `flip`: return a borrowed worker to its owner, the group that has lent it. If `name` is a group that
        has borrowed a worker, this worker is returned. If `name` is a group that has lent workers, the lent worker with
        the lowest rank is returned. Yield the states of the groups that must finish their work first, and finally the
        state of the owner.

        Raises NotFoundError if the group has neither borrowed nor lent a worker. Raises UnavailableError if the group
        with the borrowed worker is the only one that can generate tokens. Also raises UnavailableError if the owner has
        no other workers and does not start again; the supervisor retries this start.
        """
        borrowers = self._members.orders.borrowers(name)
        if name not in self._members.orders.lent and not borrowers:
            raise NotFoundError(f"{name} has no worker to return: name a group that has borrowed or lent one")
        return self._unflip(borrowers[min(borrowers)] if borrowers else name)

    async def _lend(self, name: str) -> AsyncGenerator[GroupState, None]:
        with self._members.returning(name):
            async with aclosing(self._spare(name, check=self._members.require_flippable)) as states:
                async for state in states:
                    yield state
        made = self._members.lend(name)
        logger.info("group=%s borrows a worker of group=%s", made, name)
        try:
            borrower = await self._until_there(made)
        except UnavailableError:
            async for _ in self._give_back(made):
                pass
            raise
        yield borrower

    async def _unflip(self, borrower: str) -> AsyncGenerator[GroupState, None]:
        lender = self._members.orders.lender(borrower)
        with self._members.returning(borrower):
            async with aclosing(self._give_back(borrower, check=self._members.require_flippable)) as states:
                async for state in states:
                    yield state
        if lender not in self._members.orders.leaving:
            yield await self._until_there(lender)

    async def _give_back(self, borrower: str, check: Check = lambda name: None) -> AsyncGenerator[GroupState, None]:
        """Drain the group with the borrowed worker and the group that owns the worker, then return the worker. `check`
        is as in `_spare`. If the order to return the worker has already been given, only wait until it is carried out.
        """
        lender = self._members.orders.lender(borrower)
        if borrower not in self._members.orders.leaving:
            names = filter(self._members.is_present, (borrower, lender))
            async with aclosing(self._spare(*names, check=check)) as states:
                async for state in states:
                    yield state
            self._members.give_back(borrower)
            logger.info("group=%s returns its worker to group=%s", borrower, lender)
        while borrower in self._members.orders.lent:
            if borrower not in self._members.orders.leaving:
                raise UnavailableError(f"{borrower} was let have work again meanwhile: it keeps its worker")
            await self._members.until(lambda: None if borrower in self._members.orders.lent else True, _POLL_S)

    async def _spare(self, *names: str, check: Check) -> AsyncGenerator[GroupState, None]:
        """Drain the groups, and yield their states until none has work left. If the caller stops before that, the
        drains are withdrawn.

        Raises UnavailableError if an operator undrains one of the groups or if one disappears. `check` is called with
        the first name before the drain, and again after it, because other groups may be drained meanwhile; its error is
        raised.
        """
        before = self._members.orders.drained
        is_spared = False
        for name in names[:1]:
            check(name)
        try:
            for name in names:
                async with aclosing(self._drain(name, leave=False, is_brief=True)) as states:
                    async for state in states:
                        yield state
            for name in names:
                if name not in self._members.orders.drained or not self._members.is_present(name):
                    raise UnavailableError(f"{name} was let have work again, or left, meanwhile: no role has changed")
            for name in names[:1]:
                check(name)
            is_spared = True
        finally:
            if not is_spared:
                orders = self._members.orders
                self._members.keep_orders(replace(orders, drained=orders.drained - ({*names} - before)))

    async def _until_there(self, name: str) -> GroupState:
        """Wait until the group has workers and return its state. Raises UnavailableError if it cannot be started, and
        NotFoundError if it is no longer known."""
        while (state := self._poller.group(name)) is None:
            absence = self._members.absence(name)
            if absence is not None and absence.error:
                raise UnavailableError(f"{name} did not start: {absence.error}")
            if absence is None and name not in self._members.orders.stand_ins:
                raise NotFoundError(f"{name} is gone")
            await self._members.until(partial(self._settled, name), _POLL_S)
        return state

    def _moved(self, name: str, num_requests: int) -> bool | None:
        is_as_before = self._members.load(name).num_requests == num_requests and self._members.is_present(name)
        return None if is_as_before else True

    def _settled(self, name: str) -> bool | None:
        absence = self._members.absence(name)
        return True if self._members.is_present(name) or (absence is not None and absence.error) else None

    def _is_idle(self, group: GroupState) -> bool:
        """Return True if no request, slot or memory of the group is in use. A group that is neither ready nor answers
        counts as idle, because it has no worker that could hold any."""
        if group.num_requests or self._members.load(group.name).num_requests:  # at the last poll, or now
            return False
        if group.role == "prefill":
            return True
        if (held := group.generation) is not None:
            return held.num_free == held.num_slots and not held.num_bytes_held
        return not any(each.name == group.name and each.ready for each in self._members.present.groups)
