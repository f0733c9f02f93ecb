"""Limits the device memory for the KV of a rank's jobs. Before a job begins, the maximum memory that it needs is
reserved.

`prefill_workers.engine` makes the reservation when a job is submitted, while the engine's lock is held. A job keeps one
layer of KV on the device (`device_kv`). This is the KV of three ranges of tokens, each in a buffer of whole pages: the
cached prefix, the tokens that earlier ranks compute, and the tokens that this rank computes. If links transfer device
memory, the last two ranges may be kept for all layers at the same time, because earlier ranks may be several layers
ahead and the next rank several layers behind.
"""

from baton.errors import ConfigError, InvalidArgumentError, ResourceExhaustedError
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.weight_sizes import weight_bytes
from baton.modeling.kv.row_memory import PAGE_BYTES
from baton.types import JobId, KvLayout, TokenRange
from prefill_workers.job import Job

_FIELD = "prefill.device_memory_bytes"


class DeviceRoom:
    """Reservations of device memory for the KV of one rank's jobs. Not thread-safe: guarded by the engine's lock."""

    def __init__(self, layout: KvLayout, limit_bytes: int | None = None) -> None:
        """Create an object that has no reservations yet. `limit_bytes` is the maximum number of bytes of KV on the
        device; None: no limit."""
        self.limit_bytes = limit_bytes
        self._row_bytes = layout.row_bytes
        self._promised: dict[JobId, int] = {}

    @classmethod
    def of(cls, decoder: Decoder, device_memory_bytes: int = 0) -> "DeviceRoom":
        """Return the object for the reservations of a rank that runs `decoder`. Its limit for KV is
        `device_memory_bytes` minus the size of the weights. KV is not limited if `device_memory_bytes` is 0, or if the
        device computes in host memory. Raises ConfigError if the weights need all of the memory."""
        if not device_memory_bytes or decoder.device.is_home:
            return cls(decoder.layout)
        weights = weight_bytes(decoder.weights)
        if device_memory_bytes <= weights:
            raise ConfigError(f"{_FIELD} = {device_memory_bytes} is out of range: weights take {weights}, use more")
        return cls(decoder.layout, device_memory_bytes - weights)

    def promise(self, job: Job, own: TokenRange, num_layers: int = 1) -> None:
        """Reserve the maximum device memory that a job needs on a rank that computes the tokens `own`. This is the
        KV of `own` and of the tokens that earlier ranks compute, in `num_layers` layers, and the KV of the cached
        prefix in one layer.

        Raises InvalidArgumentError if the job alone exceeds the limit. Raises ResourceExhaustedError if it does not fit
        together with the reservations of other jobs.
        """
        if self.limit_bytes is None:
            return
        earlier = TokenRange(job.cached.end, own.start)
        need = sum(self._bytes_of(tokens) for _, tokens in job.cached_pieces)
        need += num_layers * sum(map(self._bytes_of, (own, earlier)))
        layers = "a layer" if num_layers == 1 else f"{num_layers} layers"
        what = f"job {job.number}: {layers} of {own.end} tokens take{'s' * (num_layers == 1)} {need} bytes"
        text = f"{what}, and {_FIELD} leaves {self.limit_bytes}"
        if need > self.limit_bytes:
            raise InvalidArgumentError(f"{text} for KV: shorten the prompt, or raise it")
        taken = sum(self._promised.values())
        if need + taken > self.limit_bytes:
            raise ResourceExhaustedError(f"{text}, of which other jobs take {taken}: retry later, or raise it")
        self._promised[job.number] = need

    def give_back(self, number: JobId) -> None:
        """Release the reservation of a job that has ended. Idempotent."""
        self._promised.pop(number, None)

    def _bytes_of(self, tokens: TokenRange) -> int:
        return -(-len(tokens) * self._row_bytes // PAGE_BYTES) * PAGE_BYTES
