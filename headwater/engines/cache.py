"""Keys and values of what has been read: prompts once each, answers one row each.

Rows and prompts are kept compact (the last moves into the place of one that leaves), so a decoding
step works on slices of the buffers and never gathers them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.models.layout import Tree

NEGATIVE = -1e30
"""Score of a masked key: finite, so that a row that sees none of a part gets weight 0, not NaN."""


class Buffer:
    """`[slots, layers' heads, length, D]` per layer, for keys and values, growing by doubling."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def room(self, layer: int, like: Tensor, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Buffers of a layer with at least this much room. `like` is `[H, N, D]`."""
        held = self.keys.get(layer)
        if held is None or held.shape[0] < slots or held.shape[2] < length:
            heads, width = like.shape[0], like.shape[2]
            old = (0, 0) if held is None else (held.shape[0], held.shape[2])
            size = [_grown(old[0], slots), heads, _grown(old[1], length), width]
            # float32 on CPU: its products are faster there, and scores are needed in float32
            dtype = torch.float32 if like.device.type == "cpu" else like.dtype
            for store in (self.keys, self.values):
                grown = torch.zeros(size, dtype=dtype, device=like.device)
                if held is not None:
                    grown[: old[0], :, : old[1]] = store[layer]
                store[layer] = grown
        return self.keys[layer], self.values[layer]

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another, in every layer."""
        for store in (self.keys, self.values):
            for held in store.values():
                held[target] = held[source]

    def clear(self) -> None:
        """Forget everything, so that the next use does not depend on how large the last one was."""
        self.keys.clear()
        self.values.clear()


def _grown(held: int, wanted: int) -> int:
    return held if wanted <= held else max(wanted, 2 * held)


class Prefill:
    """Runs prompts as a Tree without continuations and keeps their keys and values."""

    def __init__(self, lengths: list[int], first_slot: int, store: Buffer, device: torch.device) -> None:
        self.tree = Tree([(n, ()) for n in lengths], device)
        self.first_slot, self.store, self.lengths = first_slot, store, lengths

    def attend(self, layer: int, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, scale: float) -> Tensor:
        """Causal attention within each prompt, `[1, N, H, D]`."""
        slots = self.first_slot + len(self.lengths)
        keys, values = self.store.room(layer, key_1HND[0], slots, max(self.lengths))
        at = 0
        for slot, n in enumerate(self.lengths, self.first_slot):
            keys[slot, :, :n] = key_1HND[0, :, at : at + n]
            values[slot, :, :n] = value_1HND[0, :, at : at + n]
            at += n
        return self.tree.attend(layer, query_1HND, key_1HND, value_1HND, scale)


class Decode:
    """One new token per row. Each row sees its prompt, which its siblings share, and its own past.

    The two parts are attended separately and joined by their log-sum-exp, so a prompt's keys are read
    once for all of its siblings.
    """

    def __init__(self, slot_N: Tensor, length_N: Tensor, prompt_length_P: Tensor, prompts: Buffer, own: Buffer) -> None:
        self.prompts, self.own, self.length_N = prompts, own, length_N
        self.row_N = torch.arange(len(slot_N), device=slot_N.device)
        self.slot_N, self.slots = slot_N, len(prompt_length_P)
        count_P = torch.bincount(slot_N, minlength=self.slots)
        self.columns = int(count_P.max())
        order = torch.argsort(slot_N, stable=True)
        starts = torch.cumsum(count_P, 0) - count_P
        column_N = torch.empty_like(slot_N)
        column_N[order] = self.row_N - starts[slot_N[order]]
        self.column_N = column_N
        self.prompt_width = int(prompt_length_P.max())
        self.own_width = int(length_N.max()) + 1
        self.prompt_mask = _beyond(prompt_length_P, self.prompt_width)
        self.own_mask = _beyond(length_N + 1, self.own_width)

    def attend(self, layer: int, query_1HND: Tensor, key_1HND: Tensor, value_1HND: Tensor, scale: float) -> Tensor:
        """Attention output, `[1, N, H, D]`."""
        rows, (heads, _, width) = len(self.row_N), key_1HND.shape[1:]
        own_k, own_v = self.own.room(layer, key_1HND[0], rows, self.own_width)
        own_k[self.row_N, :, self.length_N] = key_1HND[0].transpose(0, 1).to(own_k.dtype)
        own_v[self.row_N, :, self.length_N] = value_1HND[0].transpose(0, 1).to(own_v.dtype)
        repeat = query_1HND.shape[1] // heads
        query = (query_1HND[0].transpose(0, 1).float() * scale).reshape(rows, heads, repeat, width)
        past_k, past_v = own_k[:rows, :, : self.own_width], own_v[:rows, :, : self.own_width]
        own_out, own_norm = _part(query, past_k, past_v, self.own_mask)
        prompt_out, prompt_norm = self._prompt_part(layer, query)
        share = torch.sigmoid(prompt_norm - own_norm)[..., None]
        out = share * prompt_out + (1 - share) * own_out
        return out.reshape(1, rows, heads * repeat, width).to(query_1HND.dtype)

    def _prompt_part(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Siblings side by side as more queries of their prompt."""
        keys = self.prompts.keys[layer][: self.slots, :, : self.prompt_width]
        values = self.prompts.values[layer][: self.slots, :, : self.prompt_width]
        _, heads, repeat, width = query.shape
        padded = query.new_zeros(self.slots, self.columns, heads, repeat, width)
        padded[self.slot_N, self.column_N] = query
        merged = padded.transpose(1, 2).reshape(self.slots, heads, self.columns * repeat, width)
        out, norm = _part(merged, keys, values, self.prompt_mask)
        out = out.reshape(self.slots, heads, self.columns, repeat, width).transpose(1, 2)
        norm = norm.reshape(self.slots, heads, self.columns, repeat).transpose(1, 2)
        return out[self.slot_N, self.column_N], norm[self.slot_N, self.column_N]


def _beyond(length_R: Tensor, width: int) -> Tensor | None:
    """True where a key lies beyond a row's length, `[R, 1, 1, width]`; None when none does."""
    if int(length_R.min()) == width:
        return None
    places = torch.arange(width, device=length_R.device)
    return (places >= length_R[:, None])[:, None, None]


def _part(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax attention over one part in float32, and the log of its normaliser."""
    scores = query @ keys.float().transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, NEGATIVE)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights @ values.float()) / total, (largest + total.log())[..., 0]
