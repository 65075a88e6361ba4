"""Liger's chunked log-probabilities, the function under its GRPO loss. On a CPU it is plain PyTorch; triton is not needed."""

from bench.cases.logprobs import job


def logprobs(**sizes):
    from liger_kernel.chunked_loss.fused_linear_ppo import (
        _SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE as CHUNK,
    )
    from liger_kernel.chunked_loss.fused_linear_ppo import (
        _ChunkedSelectiveLogProbFunction as Chunked,
    )

    def forward(h, w, tokens):
        out = Chunked.apply(h, w, tokens, None, 1.0, CHUNK)
        return out.sum(), out

    return job(forward, sizes, ("liger-kernel",))
