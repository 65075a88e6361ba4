"""Why a row misses its goal, and what was tried: by the row's name. The page prints it below the table. A figure is a row's own, which
`@name` stands for: nobody types it."""
WHY = {
    "PPO iteration, TRL 1.12 over ours, shared trunk":
        "The update is three quarters of an iteration, and in it both sides do the same matrix products through torch's own backward pass; there "
        "TRL, which has a value model to train as well, is only a little slower. Sampling and scoring, where there was something to win, are "
        "@PPO rollout, TRL 1.12 over ours, separate values and @PPO score, TRL 1.12 over ours, separate values. The goal was set when TRL's two "
        "`gc.collect()` took longer on the machine of that day.",
    "PPO iteration, TRL 1.12 over ours, separate values":
        "The update is four fifths of it, at @PPO update, TRL 1.12 over ours, separate values of TRL's speed: two models forward and backward, and "
        "no padding to save, since all rows are equally long. Fused AdamW and no gradient for tokens that the clip holds are in.",
    "PPO iteration over the loop by hand, shared":
        "The loop does the same products and nothing else. Sampling is faster than its (@PPO rollout over the loop by hand, shared), and pays for what the "
        "loop does not compute: entropy, the exact KL, the check that the ratio begins at 1 (score: @PPO score over the loop by hand, shared) and "
        "the drift of eight responses (update: @PPO update over the loop by hand, shared). To reach the goal the update itself would have to "
        "take a quarter less than torch's own forward and backward pass. Tried: one pass for policy and values (in), micro-batches by "
        "length and rows without padding (below; nothing to win on rows of one length).",
    "PPO iteration over the loop by hand, separate":
        "As above, with a second transformer, whose passes are the same on both sides: there is less beside them in which to be faster.",
    "GRPO iteration, TRL 1.16 over ours":
        "The update is seven tenths of it. Both sides do one forward and one backward pass of 32 rows per epoch; ours leaves the (B, T, V) table out, "
        "which at 2,000 words is a small part. Sampling is @GRPO rollout, TRL 1.16 over ours and the update @GRPO update, TRL 1.16 over ours. "
        "The rest of the goal would have to come out of torch's own passes.",
    "annotate at vocabulary 128,000, time over an epoch of the update":
        "At 64 numbers per state the time goes into the exponentials of the tables, and hardly into products. Annotation makes two tables, the policy's "
        "and the reference's, each read by a softmax, then once more for the entropy and for the exact KL; an epoch makes one and its gradient. Before, "
        "eight tables were made; whole tables take three times as long as ours. Without entropy and exact KL, which every iteration logs, "
        "it would be two tables against two.",
    "sampling, 4×128, lengths 4…64: generate over ours":
        "Rows that have ended leave, so the products shrink; what a step costs beside them, some twenty small operations a layer, does not, and with "
        "few rows left it is most of a step. The repeats reach the goal and fall short of it on a shared machine.",
    "sampling, GPT-2 small's shape, lengths 4…32: generate over ours":
        "A step reads all weights, however few rows are left, and that is most of its time: the weights' products alone would reach the limit beside it. "
        "The goal lies within the spread of the repeats.",
    "rollout time, T = 512 over T = 128":
        "Four times the tokens are 4.39 times the operations, as [How cost grows](practice/cost.ipynb) counts them, since each token looks back at all "
        "before it; so the goal leaves nothing. And looking back is a vector times a matrix, which waits for memory, where the weights' products "
        "serve all rows at once. `generate` grows by more: @rollout time by generate, T = 512 over T = 128. Tried: keys and values in buffers "
        "that never grow (in), heads that share keys in one product (in).",
}
TRIED = """What was tried to make an update cheaper, on 32 responses of 4 to 64 tokens: one forward and backward pass, the same gradient on each side.

- **Rows of like length together.** Landed where there are micro-batches anyway (`micro_batch_size`): they are sorted, and since all divide by the count of the whole minibatch the gradient stays as it was. Minibatches themselves stay shuffled: one of short answers only would be another step.
- **Rows without padding.** One mask over all rows costs more than the padding, since attention then looks at every pair of tokens of the batch. Row by row it pays, and was left out: attention would have to be replaced in every architecture, with its windows, caps and scales, and a policy changed in this way can no longer be read by our own sampling step.
- **bfloat16.** Landed as `autocast="bfloat16"`, for processors that multiply in it; this one does not. Weights in bfloat16 are accepted as they were, those in float16 refused.
- **`torch.compile`.** Compiled models are accepted.
- **Blocks below the first adapter.** With LoRA in the last blocks only, policy and reference share all blocks below, and annotation runs them twice. It was left as it is: transformers have no way to begin in the middle, so the reference's lower blocks would have to be replaced by ones that pass the policy's states on. The most that it can save is the reference's lower blocks in one pass over the rollout; the update, which runs the policy's lower blocks again in every epoch, stays as it is."""
