"""Prefills several short jobs together: each turn computes one layer of all of them.

On a GPU, a turn of a short job takes as long as the host needs to launch its kernels. Together, several jobs need
hardly more launches than one: only the attention of each job and the copies of its KV are launched separately. Only
jobs of chains of one rank are put into a batch, because other jobs must keep pace with other ranks. On a CPU, jobs are
not put into batches: a turn of one job already uses all cores.

Jobs join a batch before their first turn. A job that is cancelled, or whose logits are not finite, leaves the batch,
and the other jobs continue. An error in a turn fails all jobs of the batch. Used by `prefill_workers.engine`, on its
thread.
"""

from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate

import torch

from baton.errors import NotFiniteError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.sampling import sample
from baton.process.clock import Clock, SteadyTime
from prefill_workers.chain import ChainJob
from prefill_workers.job_scheduler import JobScheduler

MOST_JOB_TOKENS = 1024
"""Maximum number of tokens of a job that is computed together with other jobs. The turns of longer jobs take a GPU
longer than their launch takes the host."""
MOST_BATCH_TOKENS = 2048
"""Maximum number of tokens of a turn that computes several jobs. It limits how long a job that is due earlier waits for
such a turn."""


class JobBatch:
    """Jobs that are computed together. All of them begin with the batch's first turn."""

    def __init__(self, jobs: Iterable[ChainJob], decoder: Decoder, clock: Clock) -> None:
        self.jobs = list(jobs)
        """Jobs whose computation continues."""
        self._decoder, self._clock = decoder, clock
        self._turns = self._run()
        for job in self.jobs:
            job.batch = self

    def turn(self) -> None:
        """Compute about one layer of all jobs. Raises the errors of their KvSenders."""
        start_s = self._clock.now_s()
        layer = next(self._turns, None)
        for job in self.jobs:
            job.end_turn(start_s, layer)

    def leave(self, job: ChainJob) -> None:
        """Remove a job that has ended. Idempotent."""
        if job in self.jobs:
            self.jobs.remove(job)
        if not self.jobs:
            self._turns.close()

    def _run(self) -> Generator[int]:
        """Compute all layers. Yield the number of a layer after attention to own tokens, as ChainJob does."""
        decoder, time = self._decoder, SteadyTime(self._clock)
        jobs = list(self.jobs)
        step = decoder.begin([job.span for job in jobs])
        hidden_TD = decoder.embed([token_id for job in jobs for token_id in job.own_ids], step)
        for layer in range(decoder.config.num_layers):
            start_ns = time.unix_ns()
            q_TNH = decoder.project(layer, hidden_TD, step)
            lengths = [len(job.own_ids) for job in jobs]
            if layer == decoder.config.num_layers - 1:  # only the last token of each job is left
                ends = torch.tensor(list(accumulate(lengths)), device=hidden_TD.device) - 1
                q_TNH, hidden_TD, lengths = q_TNH[ends], hidden_TD[ends], [1] * len(jobs)
            attentions = [
                job.attend_own(layer, q) for job, q in zip(jobs, q_TNH.split_with_sizes(lengths), strict=True)
            ]
            yield layer
            if len(self.jobs) < len(jobs):
                kept = [index for index, job in enumerate(jobs) if job in self.jobs]
                parts = hidden_TD.split_with_sizes(lengths)
                hidden_TD = torch.cat([parts[index] for index in kept])
                jobs, attentions = [jobs[index] for index in kept], [attentions[index] for index in kept]
                step = decoder.begin([job.span for job in jobs])
            attended = [job.attend_others(layer, each) for job, each in zip(jobs, attentions, strict=True)]
            hidden_TD = decoder.complete(layer, hidden_TD, torch.cat(attended))
            num_tokens = sum(len(job.own_ids) for job in jobs)
            for job in jobs:
                job.end_layer(layer, start_ns, time, len(job.own_ids) / num_tokens)
        self._sample(jobs, hidden_TD)

    def _sample(self, jobs: Sequence[ChainJob], hidden_JD: torch.Tensor) -> None:
        """Sample the first tokens of all choices of all jobs at once, and finish the jobs. A job whose logits are not
        finite fails."""
        states = [job.sampler_states() for job in jobs]
        rows = [row for row, each in enumerate(states) for _ in each]
        logits_RV = self._decoder.logits(hidden_JD)[rows]
        tokens = iter(sample(logits_RV, [state for each in states for state in each]))
        for job, each in zip(jobs, states, strict=True):
            firsts = [next(tokens) for _ in each]
            try:
                job.finish(firsts)
            except NotFiniteError as error:
                job.fail(error.with_traceback(None))


def begin_together(job: ChainJob, scheduler: JobScheduler, decoder: Decoder, clock: Clock) -> None:
    """Put `job`, which is about to get its turn, into a batch with other jobs of `scheduler` that have not begun, the
    earliest due first. Does nothing if no other job can join it."""
    if not _joins(job, decoder):
        return
    jobs, num_tokens = [job], len(job.own_ids)
    for each in scheduler.jobs:
        if each is not job and _joins(each, decoder) and num_tokens + len(each.own_ids) <= MOST_BATCH_TOKENS:
            jobs.append(each)
            num_tokens += len(each.own_ids)
    if len(jobs) > 1:
        JobBatch(jobs, decoder, clock)


def _joins(job: ChainJob, decoder: Decoder) -> bool:
    """Return True if the job may be computed together with other jobs. A job that may have to wait for the masks of
    its first token is computed alone."""
    is_short = job.is_alone and len(job.own_ids) <= MOST_JOB_TOKENS and job.job.masks is None
    return is_short and not (decoder.device.is_home or job.has_begun or job.batch is not None)
