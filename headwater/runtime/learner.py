"""One optimizer step on a batch: objective, gradients in float32, clipping, AdamW; and, before it, the
signals that the models themselves give."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headwater.config import OptimizerConfig
from headwater.data.pack import divide, everything
from headwater.errors import NonFiniteError
from headwater.models.forward import Micro, Readings, appraise, run, score, split
from headwater.models.heads import Critic
from headwater.models.policy import Policy
from headwater.objective.policy import importance
from headwater.types import Algorithm, Batch, Group, Pull, Scored, Signal, Span, Trajectory, Update


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
    """Holds the policy that learns, with its critic and its reference if it has them. `version` counts
    the steps of the loop that it has taken part in."""

    def __init__(
        self,
        policy: Policy,
        config: OptimizerConfig,
        *,
        steps: int,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        self.policy, self.config, self.steps = policy, config, steps
        self.reference, self.critic = reference, critic
        self.version = 0
        if config.activation_checkpointing:
            policy.checkpoint_activations()
        own = critic.trainable() if critic is not None else {}
        self.masters = Masters(policy.trainable() | own)
        self.optimizer = torch.optim.AdamW(
            self._kinds(set(own)), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def _kinds(self, own: set[str]) -> list[dict[str, object]]:
        """Parameters by how they decay (matrices do, vectors do not) and how fast they learn. `scale` is
        the learning rate as a multiple of the policy's."""
        scale = (self.config.critic_lr or self.config.lr) / self.config.lr
        kinds: dict[tuple[float, float], list[Tensor]] = {}
        for name, weight in self.masters.weights.items():
            decay = self.config.weight_decay if weight.ndim >= 2 else 0.0
            kinds.setdefault((decay, scale if name in own else 1.0), []).append(weight)
        return [{"params": p, "weight_decay": decay, "scale": scale} for (decay, scale), p in kinds.items()]

    def annotate(self, groups: Sequence[Group], algorithm: Algorithm, temperature: float) -> list[Group]:
        """The groups with the signals that the algorithm needs and the models give: of level token
        "ref_logp", "logp" and "value", and for KTO "reference_point"."""
        given = algorithm.needs & {"ref_logp", "logp", "value", "reference_point"}
        if not given:
            return list(groups)
        found: dict[int, list[Signal]] = {}
        reading = dataclasses.replace(algorithm, head="after" if "value" in given else None)
        batch, owners = everything(groups, reading, temperature)
        micro = self.config.micro_tokens
        if "ref_logp" in given:
            assert self.reference is not None, "an algorithm that needs ref_logp has a reference"
            _attach(found, "reference", "ref_logp", owners, batch, score(self.reference, batch, micro))
        if "logp" in given:
            _attach(found, "learner", "logp", owners, batch, score(self.policy, batch, micro))
        if "value" in given:
            assert self.critic is not None, "an algorithm that needs value has a critic"
            before_T, after_T = appraise(self.policy, self.critic, batch, micro)
            _attach(found, "critic", "value", owners, batch, before_T, after_T)
        if "reference_point" in given:
            point = self._reference_point(groups, algorithm, temperature)
            for owner in owners:
                said = Signal(source="reference", name="reference_point", values=(point,))
                found.setdefault(id(owner), []).append(said)
        return [_with_signals(group, found) for group in groups]

    def _reference_point(self, groups: Sequence[Group], algorithm: Algorithm, temperature: float) -> float:
        """KTO's z: mean log pi/ref of answers put to other prompts (Ethayarajh et al. 2024,
        arXiv:2402.01306, sec. 4.1), at least 0. One group alone has no other prompt: 0."""
        assert self.reference is not None, "a reference point needs a reference"
        if len(groups) < 2:
            return 0.0
        following = [*groups[1:], groups[0]]
        strangers = [_asked(group, other) for group, other in zip(groups, following, strict=True)]
        batch, owners = everything(strangers, dataclasses.replace(algorithm, head=None), temperature)
        micro = self.config.micro_tokens
        gap_T = score(self.policy, batch, micro) - score(self.reference, batch, micro)
        return max(0.0, float(gap_T.double().sum()) / max(1, len(owners)))

    def step(self, batch: Batch, *, updates: int = 1, epochs: int = 1) -> Update:
        """Take a step of the loop and say what it did: one optimizer update on the whole batch or, with
        `updates` and `epochs`, one on each of so many parts of it, over and over.

        Raises NonFiniteError when the loss or the gradient of an update is NaN or infinite; that update
        leaves weights and moments untouched. A batch in which nothing pulls (all groups flat) moves
        nothing: AdamW would otherwise drift on old momentum.
        """
        started = time.perf_counter()
        lr = learning_rate(self.config, self.version, self.steps)
        if len(batch.target_T) == 0:
            return self.skip()
        parts = [part for _ in range(epochs) for part in divide(batch, updates) if len(part.target_T)]
        found = [self._update(part, lr) for part in parts]
        self.version += 1
        return _merged(found, self.version, len(batch.target_T), time.perf_counter() - started)

    def _update(self, batch: Batch, lr: float) -> Update:
        """One optimizer update."""
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
            group["lr"] = lr * group["scale"]
        self.optimizer.step()
        self.masters.publish()
        return tally.update(self.version + 1, norm, lr)

    def skip(self) -> Update:
        """Let a step pass without moving anything: it had nothing to teach, or was refused."""
        lr = learning_rate(self.config, self.version, self.steps)
        self.version += 1
        return Update(version=self.version, loss=0.0, grad_norm=0.0, lr=lr, tokens=0, entropy=math.nan)

    def _accumulate(self, batch: Batch, micro: Micro, tally: _Tally) -> None:
        """Loss of one micro-batch, and its gradient into the masters. The objective is differentiated
        first, down to what the models said of each token; where its slope is zero although an advantage
        pulls, it was clipped."""
        readings = run(self.policy, micro, batch, critic=self.critic, reference=self.reference)
        outputs = [readings.logp_T, *readings.measured.values()]
        if readings.value_T is not None:
            outputs.append(readings.value_T)
        leaves = [output.detach().requires_grad_() for output in outputs]
        leaf = Readings(
            logp_T=leaves[0],
            entropy_T=readings.entropy_T,
            measured=dict(zip(readings.measured, leaves[1:], strict=False)),
            value_T=leaves[-1] if readings.value_T is not None else None,
        )
        loss = torch.zeros((), device=leaves[0].device)
        for pull in batch.pulls:
            part = _loss(pull, batch, micro.scored, leaf)
            loss = loss + pull.coefficient * part
            tally.terms[pull.name] = tally.terms.get(pull.name, 0.0) + float(part.detach())
        slopes: list[Tensor] = [torch.zeros_like(leaves[0])] * len(leaves)
        if loss.requires_grad:
            slopes = list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        pairs = [(out, slope) for out, slope in zip(outputs, slopes, strict=True) if out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [slope for _, slope in pairs])
        tally.add(micro.scored, leaves[0].detach(), readings.entropy_T, slopes[0], float(loss.detach()))

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


def _attach(
    found: dict[int, list[Signal]],
    source: str,
    name: str,
    owners: Sequence[Trajectory],
    batch: Batch,
    values_T: Tensor,
    after_T: Tensor | None = None,
) -> None:
    """Token values as a signal of each trajectory; with one more where `after_T` is given: after the last."""
    ends = torch.bincount(batch.sequence_T, minlength=len(owners)).cumsum(0).tolist()
    start = 0
    for owner, end in zip(owners, ends, strict=True):
        values = values_T[start:end].tolist()
        if after_T is not None:
            values.append(float(after_T[end - 1]))
        found.setdefault(id(owner), []).append(Signal(source=source, name=name, values=tuple(values), level="token"))
        start = end


def _with_signals(group: Group, found: Mapping[int, Sequence[Signal]]) -> Group:
    def more(trajectory: Trajectory) -> Trajectory:
        new = tuple(found.get(id(trajectory), ()))
        names = {signal.name for signal in new}
        kept = tuple(signal for signal in trajectory.signals if signal.name not in names)
        return dataclasses.replace(trajectory, signals=kept + new)

    return dataclasses.replace(group, trajectories=tuple(map(more, group.trajectories)))


def _asked(group: Group, other: Group) -> Group:
    """The answers of a group, put to the prompt of another."""
    prompt: Span = other.trajectories[0].spans[0]
    moved = (dataclasses.replace(t, spans=(prompt, *t.spans[1:])) for t in group.trajectories)
    return dataclasses.replace(group, trajectories=tuple(moved))


def _loss(pull: Pull, batch: Batch, rows: slice, readings: Readings) -> Tensor:
    """Σ weight · loss of one term over those of its tokens that are among some scored tokens."""
    device = readings.logp_T.device
    bounds = torch.searchsorted(pull.of_T, torch.tensor([rows.start, rows.stop]))
    mine = slice(int(bounds[0]), int(bounds[1]))
    of_T = pull.of_T[mine]
    if len(of_T) == 0:
        return torch.zeros((), device=device)
    local_T = (of_T - rows.start).to(device)

    def column(values_T: Tensor | None) -> Tensor | None:
        return None if values_T is None else values_T[of_T].to(device)

    sequence_T = batch.sequence_T[of_T]
    scored = Scored(
        logp_T=readings.logp_T[local_T],
        advantage_T=pull.advantage_T[mine].to(device),
        sequence_T=sequence_T.to(device),
        group_T=torch.tensor(batch.prefix_S)[sequence_T].to(device),
        behavior_logp_T=column(batch.behavior_logp_T),
        proximal_logp_T=column(batch.proximal_logp_T),
        ref_logp_T=column(batch.ref_logp_T),
        value_T=None if readings.value_T is None else readings.value_T[local_T],
        old_value_T=column(batch.old_value_T),
        measured={name: values_T[local_T] for name, values_T in readings.measured.items()}
        | {name: values_T[of_T].to(device) for name, values_T in batch.constants.items()},
    )
    return (pull.weight_T[mine].to(device) * pull.loss(scored)).sum()


def _merged(found: Sequence[Update], version: int, tokens: int, seconds: float) -> Update:
    """One Update of several: means, over those that have a number."""
    if len(found) == 1:
        return dataclasses.replace(found[0], version=version, seconds=seconds)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return Update(
        version=version,
        loss=mean([u.loss for u in found]) or 0.0,
        grad_norm=mean([u.grad_norm for u in found]) or 0.0,
        lr=found[0].lr,
        tokens=tokens,
        entropy=sum(u.entropy for u in found) / len(found),
        mismatch=found[0].mismatch,
        ess=mean([u.ess for u in found]),
        sequence_ess=mean([u.sequence_ess for u in found]),
        clip_fraction=mean([u.clip_fraction for u in found]),
        kl=mean([u.kl for u in found]),
        seconds=seconds,
        terms={name: mean([u.terms[name] for u in found]) or 0.0 for name in found[0].terms},
    )


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

    def update(self, version: int, norm: float, lr: float) -> Update:
        batch, behavior_T, ref_T = self.batch, self.batch.behavior_logp_T, self.batch.ref_logp_T
        ratio = kl = None
        if behavior_T is not None:
            sampled_T = ~behavior_T.isnan()
            sequence_T = batch.sequence_T[sampled_T]
            ratio = importance(self.logp_T[sampled_T], behavior_T[sampled_T], sequence_T)
        if ref_T is not None:
            gap_T = (ref_T - self.logp_T)[~ref_T.isnan()].clamp(-20, 20)
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
            sequence_ess=ratio.sequence_ess if ratio else None,
            clip_fraction=self.clipped / len(batch.target_T) if ratio else None,
            kl=kl,
            terms=self.terms,
        )
