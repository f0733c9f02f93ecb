"""Fetching of the keys that InfiniGen selects, as on a GPU: by tensors and Triton kernels, on a CPU device that
replaces a GPU or on a GPU itself.

On a CPU, these functions launch Triton kernels. Therefore, they need a process with Triton's interpreter
(tests/support/kernels/triton/process.py).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from baton.modeling.device.copying import UNBOUND, LinkRate, PacedLink
from baton.modeling.device.heads import PickedHeads, RowCopies
from baton.modeling.device.port import Device
from baton.modeling.forward.decoder import Decoder
from baton.modeling.forward.selection import Selection
from baton.modeling.forward.triton.attention import triton_kernel
from baton.modeling.kernels.triton.copies import copy_heads, copy_rows
from baton.modeling.kv.transfers import DoneTransfer, Transfer
from baton.sampling_params import SamplingParams
from generate_workers.residency.fetched.infinigen import FetchedInfinigenResidency
from generate_workers.residency.policies import make_residency
from generate_workers.residency.port import KvShape
from generate_workers.residency.row_parts import MakeMemory
from tests.support.engines.devices import PoisonedCuda, TensorDevice, on_emulated
from tests.support.engines.generation import harness, prompt
from tests.support.engines.infinigen import KnownSource, prepared
from tests.support.engines.selective import Bench
from tests.support.models.tiny_models import random_decoder

FEW = Selection(3.0, 0.1, 2, 3, free_keys=6)
"""Selection of very few keys, so that the keys in device memory change often."""
PROMPTS = [prompt(length, seed) for seed, length in enumerate((50, 21, 70))]
TOKENS = prompt(200, seed=9)
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
TOLERANCE = 1e-4


class LaunchedLink(PacedLink):
    """Link whose copies by address are the kernels that a GPU runs. Each copy has finished when the call returns,
    because Triton's interpreter runs one kernel at a time."""

    def fetch_heads(self, heads: PickedHeads) -> Transfer:
        copy_heads(heads.home_B, heads.there_B, heads.pairs_BGK2, heads.num_BG, heads.head_bytes)
        self._num_bytes_fetched += heads.num_bytes
        return DoneTransfer()

    def store_rows(self, rows: RowCopies) -> Transfer:
        copy_rows(rows.there_B, rows.home_B, rows.row_bytes)
        self._num_bytes_stored += rows.num_bytes
        return DoneTransfer()


def standing(link: str) -> TensorDevice:
    """Return a CPU device that replaces a GPU. `link` names how its link copies: by Triton's kernels (launched), by
    threads, or by delayed threads (slow)."""
    device = TensorDevice()
    slow = LinkRate(2e6, 1e-3)
    device.link = {"launched": LaunchedLink(UNBOUND), "threads": PacedLink(UNBOUND), "slow": PacedLink(slow)}[link]
    return device


def on_gpu(plain: Decoder, device: Device) -> Decoder:
    """Return the same model on a device, with row operations by Triton's kernels."""
    if device.torch_device.type == "cuda":
        config = plain.config
        shape = {"num_layers": config.num_layers, "num_kv_heads": config.num_kv_heads}
        return random_decoder(**shape, dtype=plain.layout.dtype, device=device)  # type: ignore[arg-type]
    made = Decoder(plain.config, plain.weights, device=device)
    made._has_native_rows, made.has_triton_rows, made.fused, made.kernel = False, True, None, triton_kernel
    return made


def policy(decoder: Decoder, num_areas: int) -> Callable[[KvShape, MakeMemory], FetchedInfinigenResidency]:
    """Return a function that creates the residency on the decoder's device, with `num_areas` areas per sequence and the
    least memory that suffices."""

    def make(shape: KvShape, _: MakeMemory) -> FetchedInfinigenResidency:
        found = prepared(FEW, 1, decoder=decoder)
        probe = FetchedInfinigenResidency(shape, found, decoder)
        areas = probe.num_areas
        area = probe._rows[0].hot.bytes_for(shape.max_slot_tokens) // areas
        each = probe.bytes_for(shape.max_slot_tokens).device - (areas - num_areas) * area
        source = KnownSource(decoder, found=found, device_bytes=probe.scratch_bytes + shape.num_slots * each)
        made = make_residency("infinigen", shape, decoder.device, source)
        assert isinstance(made, FetchedInfinigenResidency)
        assert made.num_areas == num_areas
        return made

    return make


def decoders(device: Device, num_layers: int) -> tuple[Decoder, Decoder]:
    """Return the same model on an emulated device and on the given device. Two query heads share a KV head."""
    plain = random_decoder(num_layers=num_layers)
    return on_emulated(plain), on_gpu(plain, device)


def picked(bench: Bench, num_steps: int) -> tuple[list[Tensor], list[list[list[int]]], int]:
    """Run steps in which different sequences take part. Return the logits of each step, the number of keys that each KV
    head selected, and the bytes copied over the link during steps."""
    link, logits, numbers, before = bench.decoder.device.link, [], [], bench.residency.num_link_bytes
    linked = link.num_bytes_fetched + link.num_bytes_stored
    for step in range(num_steps):
        slots = [slot for slot in range(len(PROMPTS)) if (step + slot) % 4]
        found, watched = bench.run({slot: [TOKENS[step + slot]] for slot in slots})
        logits.append(found.cpu())
        numbers += [picks.num_BG.tolist() for picks in watched.found.values() if picks is not None]
    num_bytes = bench.residency.num_link_bytes - before
    assert num_bytes == link.num_bytes_fetched + link.num_bytes_stored - linked
    return logits, numbers, num_bytes


def check_steps(device: Device, num_areas: int, num_steps: int) -> int:
    """Assert that the steps' logits and numbers of selected keys equal those on the emulated device. Return the bytes
    of the steps."""
    results = []
    for decoder in decoders(device, 5):
        bench = Bench.of(decoder, policy(decoder, num_areas), PROMPTS, 24)
        results.append(picked(bench, num_steps))
        bench.close()
    (expected, picks, _), (logits, found, num_bytes) = results
    assert found == picks
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)
    return num_bytes


def answers(decoder: Decoder) -> list[list[int]]:
    """Return the tokens of sequences that join one by one, prefilled remotely or locally in chunks, and of two choices
    of one prompt."""
    with harness(decoder=decoder, policy=policy(decoder, 2), num_slots=4, max_slot_tokens=64) as made:
        ref = made.reserve(30, 40).ref
        made.push_and_commit(ref, prompt(30), PARAMS)
        streams = [made.submit(prompt(30), PARAMS, ref=ref)[1]]
        made.engine.step()
        streams.append(made.submit(prompt(19), PARAMS)[1])
        choices = made.submit(prompt(5), replace(PARAMS, n=2, temperature=1.0, seed=3))[1]
        made.run()
        return [*(stream.token_ids for stream in streams), *(choices.choice(at).token_ids for at in range(2))]


def check_answers(device: Device) -> None:
    """Assert that an engine's tokens equal those on the emulated device."""
    expected, found = (answers(decoder) for decoder in decoders(device, 4))
    assert found == expected


def check_standing(link: str, num_areas: int | None) -> None:
    """Run a check on a CPU device that replaces a GPU. With `num_areas`, check steps with this number of areas; with
    None, check an engine's tokens."""
    torch.set_num_threads(1)
    device = standing(link)
    if num_areas is None:
        check_answers(device)
    else:
        assert check_steps(device, num_areas, 5) > 0
    device.link.rest()


def gpu() -> Device:
    """Return a GPU whose memory reads as NaN until it is written."""
    return PoisonedCuda()
