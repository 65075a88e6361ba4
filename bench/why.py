"""Why a row misses its goal, and what was tried: by the row's name. The page prints it below the table. A figure is a row's own, which
`@name` stands for: nobody types it."""

WHY = {
    "PPO iteration, TRL 1.12 over ours, shared trunk": "Little is missing. The update is three quarters of our iteration and hardly longer than the loop's by hand (@PPO update over the loop by hand, "
    "shared), which does the same products and nothing else; sampling is far ahead (@PPO rollout, TRL 1.12 over ours, separate values, with separate values). "
    "What is left is scoring, which pays for entropy and exact KL.",
    "PPO iteration, TRL 1.12 over ours, separate values": "The goal lies within the spread of the repeats. The update is four fifths of the iteration, at @PPO update, TRL 1.12 over ours, separate values: "
    "two models forward and backward on both sides, and no padding to save, since all rows are equally long.",
    "PPO iteration over the loop by hand, shared": "The loop does the same products and nothing else. Sampling is faster than its (@PPO rollout over the loop by hand, shared), and pays for what the "
    "loop does not compute: entropy, the exact KL, the check that the ratio begins at 1 (score: @PPO score over the loop by hand, shared) and "
    "the drift of eight responses (update: @PPO update over the loop by hand, shared). To reach the goal the update itself would have to "
    "take a quarter less time than the loop's, which is torch's own forward and backward pass. Tried: one pass for policy and values (in), micro-batches by "
    "length and rows without padding (below; nothing to win on rows of one length).",
    "PPO iteration over the loop by hand, separate": "As above, with a second transformer, whose passes are the same on both sides: there is less beside them in which to be faster.",
    "GRPO iteration, TRL 1.16 over ours": "The update is seven tenths of it. Both sides do one forward and one backward pass of 32 rows per epoch; ours leaves the (B, T, V) table out, "
    "which at 2,000 words is a small part. Sampling is @GRPO rollout, TRL 1.16 over ours and the update @GRPO update, TRL 1.16 over ours. "
    "The rest of the goal would have to come out of torch's own passes.",
    "annotate at vocabulary 128,000, time over an epoch of the update": "Nearly half of it is the entropy and the exact KL, which every iteration logs: log-probabilities alone take @two heads at vocabulary 128,000: "
    "log-probabilities alone, time over all that annotation says of the time, and would reach the goal. Before, eight tables were made; now two, a piece "
    "at a time. Not tried: entropy and KL of a few rows only, since both are exact in the log today.",
    "sampling, 4×128, lengths 4…64: generate over ours": "Rows that have ended leave, so the products shrink; what a step costs beside them, some twenty small operations a layer, does not, and with "
    "few rows left it is most of a step. The repeats reach the goal and fall short of it on a shared machine.",
    "sampling, GPT-2 small's shape, lengths 4…32: generate over ours": "A step reads all weights, however few rows are left, and that is most of its time: the weights' products alone would reach the limit beside it. "
    "The goal lies within the spread of the repeats.",
    "rollout time, T = 512 over T = 128": "Four times the tokens are 4.39 times the operations, as [How cost grows](guides/cost.ipynb) counts them, since each token looks back at all "
    "before it; so the goal leaves nothing. And looking back is a vector times a matrix, which waits for memory, where the weights' products "
    "serve all rows at once. `generate` grows by more: @rollout time by generate, T = 512 over T = 128. Tried: keys and values in buffers "
    "that never grow (in), heads that share keys in one product (in).",
    "instruct-goose quickstart": "Half of the time is the models' own products, in three stages of like length. Each stage was made shorter: half the SFT saves a sixth and "
    "comes near its limit, and nothing that takes less than .7 of the time keeps every limit on four seeds. Other kernels were slower on these shapes: "
    "attention by hand 11 ms against torch's 7, GELU by its tanh 3.9 against 2.0.",
}
TRIED = """What was tried to make an update cheaper, on 32 responses of 4 to 64 tokens: one forward and backward pass, the same gradient on each side.

- **Rows of like length together.** Landed where there are micro-batches anyway (`micro_batch_size`): they are sorted, and since all divide by the count of the whole minibatch the gradient stays as it was. Minibatches themselves stay shuffled: one of short answers only would be another step.
- **Rows without padding.** One mask over all rows costs more than the padding, since attention then looks at every pair of tokens of the batch. Row by row it pays, and was left out: attention would have to be replaced in every architecture, with its windows, caps and scales, and a policy changed in this way can no longer be read by our own sampling step.
- **bfloat16.** Landed as `autocast="bfloat16"`, for processors that multiply in it; this one does not. Weights in bfloat16 are accepted as they were, those in float16 refused.
- **`torch.compile`.** A transformer that was compiled in place says the same to rounding; once compiled, the smaller model takes less time (in the table), the larger more: there the compiler reached its limit of eight recompilations.
- **Fused AdamW.** Landed: a quarter of the time of the loop over tensors, which took a twentieth off a small model's update ([the figures](reference/training/update.ipynb)).
- **Gradient checkpointing.** Landed as `Agent(…, gradient_checkpointing=True)`: a quarter less memory for a sixth more time, on a small model ([how](learn/13_agent.ipynb#gradient-checkpointing)).
- **The policy's pass over its own responses.** Not left out, though the sampler has just seen them: entropy, exact KL and values come from it ([why](reference/training/experience.ipynb)).
- **Blocks below the first adapter.** With LoRA in the last blocks only, policy and reference share all blocks below, and annotation runs them twice. It was left as it is: transformers have no way to begin in the middle, so the reference's lower blocks would have to be replaced by ones that pass the policy's states on. The most that it can save is the reference's lower blocks in one pass over the rollout; the update, which runs the policy's lower blocks again in every epoch, stays as it is."""
