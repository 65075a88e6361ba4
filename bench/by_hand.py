"""PPO as one would write it for this model and nothing else: no checks, no metrics, every row of one length. `Loop.step` does the
work of RLHFTrainer.step with the same settings, and takes the CPU time of its three phases."""

import torch

from bench.measure import cpu


class Loop:
    def __init__(
        self,
        policy,
        reference,
        value_trunk,
        reward,
        *,
        new_tokens=32,
        epochs=4,
        lr=1e-3,
        beta=0.05,
        clip=0.2,
        value_clip=0.2,
        vf_coef=0.1,
        lam=0.95,
        max_norm=None,
    ):
        self.policy, self.reference, self.reward = policy, reference, reward
        self.value_trunk = value_trunk  # None: the values are read from the policy's own states
        self.value_head = torch.nn.Linear(policy.config.n_embd, 1)
        for p in self.value_head.parameters():
            torch.nn.init.zeros_(p)
        own = [] if value_trunk is None else list(value_trunk.parameters())
        self.groups = list(policy.parameters()), own + list(self.value_head.parameters())
        self.optimizer = torch.optim.AdamW(
            [p for group in self.groups for p in group], lr=lr, weight_decay=0.0
        )
        self.new_tokens, self.epochs, self.beta, self.clip, self.value_clip = (
            new_tokens,
            epochs,
            beta,
            clip,
            value_clip,
        )
        self.vf_coef, self.lam, self.max_norm = vf_coef, lam, max_norm

    @torch.no_grad()
    def rollout(self, queries):
        "Sample one token after another, with the model's own cache."
        ids = queries
        new = queries
        cache = None
        for _ in range(self.new_tokens):
            out = self.policy(
                input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            new = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
            cache = out.past_key_values
            ids = torch.cat([ids, new], 1)
        return ids

    def look(self, ids):
        "Log-probabilities and values of the response's tokens, in one pass where the trunk is shared."
        states = self.policy.transformer(input_ids=ids, use_cache=False)[0][
            :, -self.new_tokens - 1 : -1
        ]
        logprobs = self.of_tokens(self.policy.lm_head(states), ids)
        if self.value_trunk is not None:
            states = self.value_trunk(input_ids=ids, use_cache=False)[0][
                :, -self.new_tokens - 1 : -1
            ]
        return logprobs, self.value_head(states)[..., 0]

    def of_tokens(self, logits, ids):
        return logits.log_softmax(-1).gather(-1, ids[:, -self.new_tokens :, None])[..., 0]

    @torch.no_grad()
    def score(self, ids):
        "Old and reference log-probabilities, values, rewards, GAE, whitening."
        logprobs, values = self.look(ids)
        states = self.reference.transformer(input_ids=ids, use_cache=False)[0][
            :, -self.new_tokens - 1 : -1
        ]
        kl = logprobs - self.of_tokens(self.reference.lm_head(states), ids)
        scores = torch.tensor(self.reward(ids))
        rewards = -self.beta * kl
        rewards[:, -1] += scores
        after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        deltas = rewards + after - values
        running = 0.0
        backwards = []
        for t in reversed(range(self.new_tokens)):
            running = deltas[:, t] + self.lam * running
            backwards.append(running)
        advantages = torch.stack(backwards[::-1], 1)
        white = (advantages - advantages.mean()) * (advantages.var() + 1e-8).rsqrt()
        self.said = {"score": scores.mean().item(), "kl": kl.sum(1).mean().item()}
        return logprobs, values, white, advantages + values

    def update(self, ids, old, old_values, advantages, returns):
        "Four steps on the whole batch. Returns the mean losses."
        losses = torch.zeros(2)
        for _ in range(self.epochs):
            logprobs, values = self.look(ids)
            ratio = (logprobs - old).exp()
            policy = -torch.minimum(
                ratio * advantages, ratio.clamp(1 - self.clip, 1 + self.clip) * advantages
            ).mean()
            near = values.clamp(old_values - self.value_clip, old_values + self.value_clip)
            value = torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean() / 2
            self.optimizer.zero_grad()
            (policy + self.vf_coef * value).backward()
            if self.max_norm:
                for group in self.groups:
                    torch.nn.utils.clip_grad_norm_(group, self.max_norm)
            self.optimizer.step()
            losses += torch.stack([policy.detach(), value.detach()])
        return losses / self.epochs

    def step(self, queries, ids=None) -> dict:
        "One iteration: CPU-seconds of its phases. With `ids` these are the responses, and nothing is sampled."
        start = cpu()
        ids = self.rollout(queries) if ids is None else ids
        written = cpu()
        scored = self.score(ids)
        judged = cpu()
        policy, value = self.update(ids, *scored).tolist()
        self.said |= {"policy_loss": policy, "value_loss": value}
        return {"rollout": written - start, "score": judged - written, "update": cpu() - judged}
