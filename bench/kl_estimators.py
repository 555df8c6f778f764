"""Whose gradient does a KL term have? Monte-Carlo gradients of each estimator against the analytic ones.

    python bench/kl_estimators.py --plot docs/images/kl_estimators.png

One next-token distribution pi over a small vocabulary, with logits as parameters, and a reference. A loss of
`headwater.objective.kl` is averaged over `--samples` tokens and differentiated, `--draws` times. The mean of these
gradients is set against the gradient of KL(pi || ref) (reverse) and of KL(ref || pi) (forward), which are known in
closed form, and their scatter is the noise. On policy the tokens are pi's own; off policy those of another
distribution mu, weighed by pi/mu. "k1 in the reward" is the score function times the detached k1, with the mean
over all other samples as baseline. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwater.credit.functions import leave_one_out
from headwater.objective import kl
from headwater.objective.policy import likelihood
from headwater.types import Loss, Scored

SIZE = 12
Gradient = Callable[[Tensor, Tensor], Tensor]
"""(logits_V, tokens_N) -> gradient_V of one estimate."""


class Toy:
    """pi, ref and mu over a vocabulary, some steps apart."""

    def __init__(self, seed: int, distance: float) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.ref_V = torch.randn(SIZE, generator=chance, dtype=torch.float64).log_softmax(0)
        away_V = torch.randn(SIZE, generator=chance, dtype=torch.float64)
        stale_V = torch.randn(SIZE, generator=chance, dtype=torch.float64)
        self.logits_V = self.ref_V + distance * away_V
        self.pi_V = self.logits_V.log_softmax(0)
        self.mu_V = (self.logits_V + 0.3 * stale_V).log_softmax(0)
        self.chance = chance

    def analytic(self, forward: bool) -> Tensor:
        """The gradient of KL(pi || ref), or of KL(ref || pi), in the logits."""
        logits_V = self.logits_V.clone().requires_grad_()
        pi_V = logits_V.log_softmax(0)
        parts = self.ref_V.exp() * (self.ref_V - pi_V) if forward else pi_V.exp() * (pi_V - self.ref_V)
        (gradient_V,) = torch.autograd.grad(parts.sum(), logits_V)
        return gradient_V

    def draw(self, count: int, behavior_V: Tensor) -> Tensor:
        """Tokens of a distribution."""
        return torch.multinomial(behavior_V.exp(), count, replacement=True, generator=self.chance)

    def scored(self, logits_V: Tensor, tokens_N: Tensor, behavior_V: Tensor, advantage_N: Tensor | None) -> Scored:
        """The tokens as a loss sees them; with the measure "kl" of the whole distribution."""
        pi_V = logits_V.log_softmax(0)
        whole = (pi_V.exp() * (pi_V - self.ref_V)).sum()
        return Scored(
            logp_T=pi_V[tokens_N],
            advantage_T=torch.ones(len(tokens_N)).double() if advantage_N is None else advantage_N,
            sequence_T=torch.arange(len(tokens_N)),
            behavior_logp_T=behavior_V[tokens_N],
            ref_logp_T=self.ref_V[tokens_N],
            measured={"kl": whole.expand(len(tokens_N))},
        )

    def gradient(self, loss: Loss, tokens_N: Tensor, behavior_V: Tensor, advantage_N: Tensor | None = None) -> Tensor:
        """Of the mean of a loss over the tokens."""
        logits_V = self.logits_V.clone().requires_grad_()
        value = loss(self.scored(logits_V, tokens_N, behavior_V, advantage_N)).mean()
        return torch.autograd.grad(value, logits_V)[0]

    def in_reward(self, tokens_N: Tensor) -> Tensor:
        """Policy gradient of the reward -k1, with the others' mean as baseline; as a loss, so its negative."""
        reward_N = -(self.pi_V - self.ref_V)[tokens_N]
        return self.gradient(likelihood, tokens_N, self.pi_V, leave_one_out(reward_N))


def estimators() -> dict[str, tuple[bool, Loss | None]]:
    """By name: whether its tokens are mu's, and the loss (None: in the reward)."""
    return {
        "k1 as a loss": (False, kl.k1),
        "k1 in the reward": (False, None),
        "k2": (False, kl.k2),
        "k3": (False, kl.k3),
        "k3_plus": (False, kl.k3_plus),
        "exact": (False, kl.exact),
        "k3 · pi/mu, on policy": (False, kl.weighted(kl.k3)),
        "k1 · pi/mu, off policy": (True, kl.weighted(kl.k1)),
        "k3 · pi/mu, off policy": (True, kl.weighted(kl.k3)),
        "k3_plus · sg(pi/mu), off policy": (True, kl.weighted(kl.k3_plus, detached=True)),
        "k3_plus unweighted, off policy": (True, kl.k3_plus),
    }


def measure(toy: Toy, loss: Loss | None, off: bool, samples: int, draws: int) -> dict[str, float]:
    """Mean gradient against both analytic ones, and noise. Ratios are to the size of the reverse gradient."""
    behavior_V = toy.mu_V if off else toy.pi_V
    found = []
    for _ in range(draws):
        tokens_N = toy.draw(samples, behavior_V)
        found.append(toy.in_reward(tokens_N) if loss is None else toy.gradient(loss, tokens_N, behavior_V))
    gradient_DV = torch.stack(found)
    mean_V, reverse_V, forward_V = gradient_DV.mean(0), toy.analytic(False), toy.analytic(True)
    size = reverse_V.norm()
    noise = float((gradient_DV - mean_V).square().sum(1).mean().sqrt() / size)
    return {
        "size": float(mean_V.norm() / size),
        "to_reverse": float((mean_V - reverse_V).norm() / size),
        "to_forward": float((mean_V - forward_V).norm() / size),
        "noise": noise,
        "error_of_mean": noise / draws**0.5,
    }


def study(seeds: Sequence[int], distance: float, samples: int, draws: int) -> dict[str, dict[str, float]]:
    """Every estimator, averaged over toys."""
    found: dict[str, dict[str, float]] = {}
    for name, (off, loss) in estimators().items():
        each = [measure(Toy(seed, distance), loss, off, samples, draws) for seed in seeds]
        found[name] = {key: sum(one[key] for one in each) / len(each) for key in each[0]}
    return found


def table(found: dict[str, dict[str, float]]) -> None:
    """Print one row for each estimator."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="gradients, in units of the size of ∇KL(pi ‖ ref)")
    for title in ("estimator", "size", "off ∇KL(pi ‖ ref)", "off ∇KL(ref ‖ pi)", "noise of one", "error of the mean"):
        shown.add_column(title)
    for name, one in found.items():
        shown.add_row(name, *(f"{one[key]:.3f}" for key in one))
    Console(width=130).print(shown)


def plot(seeds: Sequence[int], samples: int, draws: int, path: Path) -> None:
    """Bias against the distance from the reference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    distances = (0.1, 0.2, 0.4, 0.7, 1.0)
    names = ("k1 as a loss", "k1 in the reward", "k2", "k3", "k3_plus", "exact")
    by_distance = [study(seeds, distance, samples, draws) for distance in distances]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", sharex=True)
    titles = ("off the gradient of KL(pi ‖ ref)", "off the gradient of KL(ref ‖ pi)", "noise of one estimate")
    for panel, key, title in zip(axes, ("to_reverse", "to_forward", "noise"), titles, strict=True):
        for name in names:
            style = "--" if name in ("k1 in the reward", "k3_plus") else "-"
            panel.plot(distances, [found[name][key] for found in by_distance], style, marker="o", ms=3, label=name)
        panel.set(title=title, xlabel="distance of pi from ref", ylim=(0, 1.6 if key != "noise" else None))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.2)
    axes[0].set_ylabel("of the size of ∇KL(pi ‖ ref)")
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Measure, print and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--distance", type=float, default=0.7, help="of pi's logits from the reference's")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    found = study(given.seeds, given.distance, given.samples, given.draws)
    table(found)
    if given.plot:
        plot(given.seeds, given.samples, given.draws // 2, given.plot)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
