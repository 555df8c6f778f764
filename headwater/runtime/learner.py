"""One optimizer step on a batch: objective, gradients in float32, clipping, AdamW."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headwater.config import OptimizerConfig
from headwater.errors import NonFiniteError
from headwater.models.forward import Micro, run, score, split
from headwater.models.policy import Policy
from headwater.objective.policy import importance
from headwater.types import Batch, Pull, Scored, Update


class Masters:
    """Float32 master weights and gradients of a policy's trainable parameters.

    A float32 parameter is its own master. A bfloat16 parameter computes forward and backward; its
    gradient is added to a float32 buffer as soon as it exists, so that accumulation over
    micro-batches never rounds, and the step is taken on the float32 master (Micikevicius et al.
    2018, arXiv:1710.03740): with a learning rate of 1e-5 most steps would vanish in bfloat16.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.weights: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype == torch.float32:
                self.weights[name] = parameter
                continue
            master = parameter.detach().float().clone()
            master.grad = torch.zeros_like(master)
            self.weights[name] = master
            parameter.register_post_accumulate_grad_hook(lambda p, master=master: _drain(p, master))

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for name, master in self.weights.items():
            self.parameters[name].grad = None
            if master.grad is not None and master is not self.parameters[name]:
                master.grad.zero_()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that compute."""
        for name, master in self.weights.items():
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)


def _drain(parameter: Tensor, master: Tensor) -> None:
    assert parameter.grad is not None and master.grad is not None
    master.grad.add_(parameter.grad)
    parameter.grad = None


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then constant,
    linear to zero or cosine to zero."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    if config.schedule == "linear":
        return config.lr * (1 - progress)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


class Learner:
    """Holds the policy that learns. `version` counts optimizer steps."""

    def __init__(self, policy: Policy, config: OptimizerConfig, *, steps: int, reference: Policy | None = None) -> None:
        self.policy, self.config, self.steps, self.reference = policy, config, steps, reference
        self.version = 0
        if config.activation_checkpointing:
            policy.checkpoint_activations()
        self.masters = Masters(policy.trainable())
        matrices = [w for w in self.masters.weights.values() if w.ndim >= 2]
        vectors = [w for w in self.masters.weights.values() if w.ndim < 2]
        kinds = [(matrices, config.weight_decay), (vectors, 0.0)]
        self.optimizer = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for params, decay in kinds if params],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, batch: Batch) -> Update:
        """Take one optimizer step and say what it did.

        Raises NonFiniteError, with weights and moments untouched, when the loss or the gradient is
        NaN or infinite. A batch in which nothing pulls (all groups flat) moves nothing: AdamW would
        otherwise drift on old momentum.
        """
        started = time.perf_counter()
        lr = learning_rate(self.config, self.version, self.steps)
        if len(batch.target_T) == 0:
            return self.skip()
        if self.reference is not None:
            ref_logp_T = score(self.reference, batch, self.config.micro_tokens)
            batch = dataclasses.replace(batch, ref_logp_T=ref_logp_T)
        self.masters.zero_grad()
        tally = _Tally(batch)
        for micro in split(batch, self.config.micro_tokens, self.policy.device):
            self._accumulate(batch, micro, tally)
        weights = list(self.masters.weights.values())
        norm = float(nn.utils.clip_grad_norm_(weights, self.config.clip))
        if not (math.isfinite(norm) and math.isfinite(tally.loss)):
            self.masters.zero_grad()
            raise NonFiniteError(
                f"Optimizer step {self.version} was refused: loss {tally.loss}, gradient norm {norm}. Weights and "
                "moments are untouched."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.masters.publish()
        self.version += 1
        return tally.update(self.version, norm, lr, time.perf_counter() - started)

    def skip(self) -> Update:
        """Let a step pass without moving anything: it had nothing to teach, or was refused."""
        lr = learning_rate(self.config, self.version, self.steps)
        self.version += 1
        return Update(version=self.version, loss=0.0, grad_norm=0.0, lr=lr, tokens=0, entropy=math.nan)

    def _accumulate(self, batch: Batch, micro: Micro, tally: _Tally) -> None:
        """Loss of one micro-batch, and its gradient into the masters. The objective is differentiated
        first, down to log-probs; where its slope is zero although an advantage pulls, it was clipped."""
        logp_T, entropy_T = run(self.policy, micro, batch.temperature)
        leaf_T = logp_T.detach().requires_grad_()
        rows = micro.scored
        loss = leaf_T.new_zeros(())
        for pull in batch.pulls:
            part = _loss(pull, batch, rows, leaf_T)
            loss = loss + pull.coefficient * part
            tally.terms[pull.name] = tally.terms.get(pull.name, 0.0) + float(part.detach())
        (slope_T,) = torch.autograd.grad(loss, leaf_T)
        torch.autograd.backward(logp_T, slope_T)
        tally.add(rows, leaf_T.detach(), entropy_T, slope_T, float(loss.detach()))

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name: masters and AdamW's moments."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self.masters.weights.items():
            tensors[f"weight/{name}"] = weight.detach()
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{key}/{name}"] = value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Continue from what `state` returned."""
        for name, weight in self.masters.weights.items():
            weight.copy_(tensors[f"weight/{name}"])
            moments = {key: tensors.get(f"{key}/{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(m is not None for m in moments.values()):
                self.optimizer.state[weight] = {
                    k: m.clone().to(weight.device) for k, m in moments.items() if m is not None
                }
        self.masters.publish()
        self.version = version


def _loss(pull: Pull, batch: Batch, rows: slice, logp_T: Tensor) -> Tensor:
    """Σ weight · loss of one term over some scored tokens."""
    device = logp_T.device

    def some(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T[rows].to(device)

    weight_T, advantage_T = pull.weight_T[rows].to(device), pull.advantage_T[rows].to(device)
    scored = Scored(
        logp_T=logp_T,
        advantage_T=advantage_T,
        sequence_T=batch.sequence_T[rows].to(device),
        behavior_logp_T=some(batch.behavior_logp_T),
        ref_logp_T=some(batch.ref_logp_T),
    )
    return (weight_T * pull.loss(scored)).sum()


class _Tally:
    """What a step did, added up over its micro-batches."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.loss = 0.0
        self.terms: dict[str, float] = {}
        self.logp_T = torch.zeros(len(batch.target_T))
        self.entropy_T = torch.zeros(len(batch.target_T))
        self.clipped = 0

    def add(self, rows: slice, logp_T: Tensor, entropy_T: Tensor, slope_T: Tensor, loss: float) -> None:
        self.logp_T[rows], self.entropy_T[rows] = logp_T.cpu(), entropy_T.cpu()
        self.loss += loss
        self.clipped += int((slope_T == 0).sum())

    def update(self, version: int, norm: float, lr: float, seconds: float) -> Update:
        batch, behavior_T, ref_T = self.batch, self.batch.behavior_logp_T, self.batch.ref_logp_T
        ratio = importance(self.logp_T, behavior_T) if behavior_T is not None else None
        kl = None
        if ref_T is not None:
            gap_T = (ref_T - self.logp_T).clamp(-20, 20)
            kl = float((gap_T.exp() - 1 - gap_T).mean())
        return Update(
            version=version,
            loss=self.loss,
            grad_norm=norm,
            lr=lr,
            tokens=len(batch.target_T),
            entropy=float(self.entropy_T.mean()),
            mismatch=ratio.mismatch if ratio else None,
            ess=ratio.ess if ratio else None,
            clip_fraction=self.clipped / len(batch.target_T) if ratio else None,
            kl=kl,
            seconds=seconds,
            terms=self.terms,
        )
