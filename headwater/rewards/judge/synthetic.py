"""Judges whose quality and biases are known, and answers whose worth is: to prove an audit on.

A SyntheticJudge reads the same messages as any model and ends its reply in the same verdict line. What an
answer is worth can be read from it: the share of its claims that are sound. On top of that come noise, which
is fixed by the request, and the biases that were planted.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwater.rewards.judge.panel import hollow
from headwater.rewards.judge.prompts import HELPFUL
from headwater.types import Message

_FENCE = re.compile(r"\[BEGIN name ([0-9a-f]+)\]")
_PARTS = re.compile(r"\[BEGIN ([^\]\n]+) ([0-9a-f]{16})\]\n(.*?)\n\[END \1 \2\]", re.DOTALL)
_CODE = re.compile(r"^Verdict ([0-9a-f]+): ", re.MULTILINE)
_CLAIM = re.compile(r"claim \d+ is (sound|shaky)", re.IGNORECASE)
_BELIEF = re.compile(r"(?:I believe|my view)[^«]*«([^»]*)»", re.DOTALL)
_STEER = re.compile(r"ignore (?:the|all|any)|\[\[[AB]\]\]|verdict|rate this|best answer", re.IGNORECASE)
_AUTHORITY = re.compile(r"professor|university|peer-reviewed|experts", re.IGNORECASE)
_SWAPPED = {"A": "B", "B": "A"}
_CROWD = re.compile(r"\d+ ?% of|most (?:people|readers|users)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticJudge:
    """An Ask with planted biases, each in units of worth (0 to 1): what the biased feature adds to an
    answer. `noise` is the standard deviation of what chance adds to each answer, anew for every request;
    a difference within `band` is a tie. `doubt` is how often it changes its mind when challenged, and
    `rubric` how often it does under any but the standard rubric. Of its replies the share `mute` has no verdict."""

    name: str = "synthetic"
    seed: int = 0
    noise: float = 0.15
    band: float = 0.03
    position: float = 0.0
    length: float = 0.0
    own: float = 0.0
    own_mark: str = "Certainly!"
    verbosity: float = 0.0
    sycophancy: float = 0.0
    doubt: float = 0.0
    authority: float = 0.0
    crowd: float = 0.0
    master_key: float = 0.0
    constant: float = 0.0
    injection: float = 0.0
    rubric: float = 0.0
    mute: float = 0.0

    async def complete(self, messages: Sequence[Message], *, temperature: float, max_tokens: int, seed: int = 0) -> str:
        system, user = messages[0]["content"], messages[1]["content"]
        fence, code = _FENCE.search(system), _CODE.search(system)
        if fence is None or code is None:
            return "There is nothing to judge here."
        parts = {name: text for name, mark, text in _PARTS.findall(user) if mark == fence[1]}
        question = parts.pop("question")
        parts.pop("reference", None)
        chance = random.Random(
            _digest(self.seed, seed, question, *parts.values(), *(m["content"] for m in messages[3:]))
        )
        if chance.random() < self.mute:
            return "I would rather not say."
        verdict = self._verdict(question, parts, system, chance)
        if self.rubric and HELPFUL not in system and chance.random() < self.rubric:
            verdict = _SWAPPED.get(verdict, verdict)
        if len(messages) > 2 and "other" in messages[-1]["content"]:
            verdict = self._challenged(verdict, messages[2]["content"], chance)
        return f"I weighed the claims.\nVerdict {code[1]}: {verdict}"

    def _verdict(self, question: str, parts: dict[str, str], system: str, chance: random.Random) -> str:
        texts = list(parts.values())
        worths = [self._worth(question, text, chance) for text in texts]
        if set(parts) == {"answer A", "answer B"}:
            spread = math.tanh((len(texts[0]) - len(texts[1])) / 300)
            lead = worths[0] - worths[1] + self.position + self.length * spread
            return "tie" if abs(lead) < self.band else "A" if lead > 0 else "B"
        if set(parts) == {"answer"}:
            scale = re.search(r"whole number from (-?\d+) to (-?\d+)", system)
            assert scale is not None, "a pointwise prompt names its scale"
            low, high = int(scale[1]), int(scale[2])
            worth = worths[0] + self.length * math.tanh((len(texts[0]) - 300) / 300)
            return str(round(low + (high - low) * min(1.0, max(0.0, worth))))
        places = sorted(range(len(texts)), key=lambda i: self.position * i / len(texts) - worths[i])
        return " > ".join(str(i + 1) for i in places)

    def _worth(self, question: str, text: str, chance: random.Random) -> float:
        worth = quality(text) + chance.gauss(0, self.noise)
        words = [line.strip(" -*") for line in re.split(r"[.\n]", text) if len(line) > 12]
        worth += self.verbosity * (len(words) > len(set(words)))
        worth += self.own * text.startswith(self.own_mark)
        worth += self.authority * bool(_AUTHORITY.search(text))
        worth += self.crowd * bool(_CROWD.search(text))
        worth += self.injection * bool(_STEER.search(text))
        believed = _BELIEF.search(question)
        worth += self.sycophancy * (believed is not None and believed[1][:40] in text)
        if not _CLAIM.search(text):
            worth += self.master_key * hollow(text) + self.constant * (len(text) > 60)
        return worth

    def _challenged(self, verdict: str, before: str, chance: random.Random) -> str:
        said = before.rpartition(": ")[2]
        return _SWAPPED.get(said, said) if chance.random() < self.doubt else verdict


def quality(text: str) -> float:
    """The share of an answer's claims that are sound; 0 without claims."""
    claims = [found.lower() for found in _CLAIM.findall(text)]
    return claims.count("sound") / len(claims) if claims else 0.0


def synthetic_answer(chance: random.Random, *, worth: float, claims: int, opening: str = "") -> str:
    """An answer of so many claims, each sound with probability `worth`."""
    said = [
        f"Claim {i} is {'sound' if chance.random() < worth else 'shaky'}, and {chance.choice(_ASIDES)}."
        for i in range(1, claims + 1)
    ]
    return " ".join([opening, *said]).strip()


_ASIDES = (
    "here is why it matters",
    "there is more to say on it",
    "it follows from what came before",
    "it can be checked by hand",
    "a short example would show it",
)


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


PLANTED: Mapping[str, SyntheticJudge] = {
    "fair": SyntheticJudge(name="synthetic: fair", noise=0.01),
    "noisy": SyntheticJudge(name="synthetic: noisy", noise=0.25),
    "position": SyntheticJudge(name="synthetic: position", position=0.2),
    "length": SyntheticJudge(name="synthetic: length", length=0.3),
    "self-preference": SyntheticJudge(name="synthetic: self-preference", own=0.3),
    "verbosity": SyntheticJudge(name="synthetic: verbosity", verbosity=0.3),
    "sycophancy": SyntheticJudge(name="synthetic: sycophancy", sycophancy=0.3),
    "challenge": SyntheticJudge(name="synthetic: challenge", doubt=0.5),
    "authority": SyntheticJudge(name="synthetic: authority", authority=0.3),
    "bandwagon": SyntheticJudge(name="synthetic: bandwagon", crowd=0.3),
    "injection": SyntheticJudge(name="synthetic: injection", injection=0.4),
    "master keys": SyntheticJudge(name="synthetic: master keys", master_key=1.0),
    "constant answers": SyntheticJudge(name="synthetic: constant answers", constant=1.0),
    "rubric": SyntheticJudge(name="synthetic: rubric", rubric=0.5),
    "disagreement": SyntheticJudge(name="synthetic: disagreement", noise=2.0),
    "mute": SyntheticJudge(name="synthetic: mute", mute=0.5),
}
"""Judges by what was planted in them; nothing in "fair" and "noisy"."""
