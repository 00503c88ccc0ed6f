"""What part of a step's processor time does each of two processes have, that compute it together?

``python -m giornata_lab.bench.degree_share`` prints it for several sizes of a picture, in turns with one process alone,
in float32 and with one thread. Two processes make a step no faster where both processors are busy anyway; the processor
time of one of them tells what two devices would take. Decision record 0022 tells of shares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import cache
from math import isqrt
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.parallel import RankGroups, shared
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from giornata_lab.bench.options import shared as shared_flags
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import parsed

TOKENS: Final = (144, 576, 1296)
PAIR: Final = (0, 1)
TIMEOUT_S: Final = 120
HEADS: Final[dict[str, Any]] = {"attention_head_dim": 64, "num_attention_heads": 12}


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    flags = shared_flags(tokens=576, text=64, repeats=9)
    return parsed(__doc__, [flag for flag in flags if flag.name in {"text", "repeats", "seed"}], arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/degree_share.json``."""
    options = options_of(arguments)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, pipes, processes = get_context("spawn"), [], []
    for me in PAIR:
        here, there = context.Pipe()
        processes.append(context.Process(target=_serve, args=(me, store.port, options.seed, there)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    try:
        lines = [_line(tokens, options, pipes) for tokens in TOKENS]
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()
    write("degree_share", lines, workload={**vars(options), "model": "6 blocks of width 768"})


def _line(tokens: int, options: SimpleNamespace, pipes: Sequence[Connection]) -> dict[str, Any]:
    _measured((0,), tokens, options.text, pipes)
    _measured(PAIR, tokens, options.text, pipes)
    times = [
        (_measured((0,), tokens, options.text, pipes), _measured(PAIR, tokens, options.text, pipes))
        for _ in range(options.repeats)
    ]
    ratios = [both / alone for alone, both in times]
    return {
        "tokens": tokens,
        "a rank of two ÷ alone": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "alone ms": round(statistics.median(alone for alone, _ in times), 1),
        "a rank of two ms": round(statistics.median(both for _, both in times), 1),
    }


def _measured(devices: tuple[int, ...], tokens: int, text: int, pipes: Sequence[Connection]) -> float:
    """Milliseconds of processor time that the busiest of these processes takes for a forward."""
    for device in devices:
        pipes[device].send((devices, tokens, text))
    took: list[float] = []
    for device in devices:
        if not pipes[device].poll(TIMEOUT_S):
            raise TimeoutError(f"process {device} has not answered for {TIMEOUT_S} s")
        took.append(pipes[device].recv())
    return max(took)


def _serve(me: int, port: int, seed: int, pipe: Connection) -> None:
    """Compute forwards until the pipe is closed, alone or with the other process."""
    torch.set_num_threads(1)
    groups = RankGroups(TCPStore("127.0.0.1", port, is_master=False), me, torch.device("cpu"), TIMEOUT_S)
    of = _family(seed)

    @cache
    def forward(devices: tuple[int, ...], tokens: int, text: int) -> tuple[ModelFamily, Any, torch.Tensor]:
        side = isqrt(tokens)
        part = shared(of, groups.of(devices, 0))
        row = tiny_flux.row(of, Spec(grid=(side, side), text_tokens=text, seed=seed))
        return part, assemble(part, [row]), row.latent

    try:
        while True:
            part, assembly, latent = forward(*pipe.recv())
            began = time.process_time()
            with torch.inference_mode():
                part.network.predict(assembly.batch, latent, assembly.conditioning, [0])
            pipe.send((time.process_time() - began) * 1e3)
    except EOFError:
        groups.close()


def _family(seed: int) -> ModelFamily:
    """3 double and 3 single blocks of width 768."""
    torch.manual_seed(seed)
    kind: Any = FluxTransformer2DModel
    widths = {"joint_attention_dim": tiny_flux.JOINT_DIM, "pooled_projection_dim": tiny_flux.POOLED_DIM}
    transformer = kind(
        patch_size=1,
        in_channels=tiny_flux.LATENT,
        num_layers=3,
        num_single_layers=3,
        **HEADS,
        **widths,
        guidance_embeds=True,
        axes_dims_rope=(8, 28, 28),
    )
    return tiny_flux.family(FluxInpaint(transformer.eval().requires_grad_(requires_grad=False)))


if __name__ == "__main__":
    main()
