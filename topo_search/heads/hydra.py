"""Hydra heads (arXiv 2402.05109): head k sees the hidden state and the embeddings of the path before it.

Head k scores x_{t+1+k} from h_t and the embeddings of the root x_{t+1} and of the drafted x_{t+2} .. x_{t+k}; they
come from the target's own frozen table. Every expanded node has a list of its own; all of a depth are drafted in one
call. Options of the one class: what a head sees of the path, the block it is made of, and for Hydra++ (section 4) more
layers and prefix attention over the committed tokens. h_t is the state *before* the root; the guide's x_t is our root.

With `root_in_prefix` the prefix layer reads each state together with the token after it, as EAGLE's layer does (arXiv
2401.15077, section 3.1): the root then asks the committed text, where the paper's layer runs before the root is known.
Head 1, which sees the root itself, keeps h_t; the layer's output stands in h_t's place from head 2 on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from topo_search.decode.plan import TreePlan
from topo_search.errors import InputError
from topo_search.heads.attention import DecoderLayer, LayerShape, PrefixContext
from topo_search.heads.base import DraftContext, DraftCost, LastState
from topo_search.heads.projection import Projection
from topo_search.identity import HeadsIdentity
from topo_search.target.adapter import Target
from topo_search.target.packing import pack_linears

Arch = Literal["mlp", "guide"]
Sees = Literal["path", "last", "fusion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraShape:
    """What decides the tensors of Hydra heads.

    Attributes:
        hidden: width of the target's hidden states and embeddings.
        num_heads: draft heads, one per depth.
        num_layers: layers per head, the first, which reads the path, included.
        arch: the first layer: `mlp`, the paper's residual SiLU layer with a linear shortcut, or `guide`, two linear
            layers with SiLU and a layer norm between them, added to h_t.
        sees: all embeddings of the path (`path`), only the last one (`last`), or one causal attention layer's output
            over h_t and the path (`fusion`).
        root_in_first: whether head 1 sees the root; without it head 1 sees h_t alone.
        prefix_attention: whether a decoder layer over all committed tokens' states replaces h_t (Hydra++).
        root_in_prefix: whether that layer reads, beside each state, the embedding of the token after it; head 1 then
            keeps h_t.
        embedding_gain: what a head multiplies the path's embeddings by: 1 in the paper; the ratio of sizes where states
            are many times larger, beside which embeddings would be learned from slowly.
        layer: shape of the attention layers; needed where there is one.
    """

    hidden: int
    num_heads: int
    num_layers: int = 1
    arch: Arch = "mlp"
    sees: Sees = "path"
    root_in_first: bool = True
    prefix_attention: bool = False
    root_in_prefix: bool = False
    embedding_gain: float = 1.0
    layer: LayerShape | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"Hydra heads need {name} of at least 1, not {getattr(self, name)}.")
        if not (math.isfinite(self.embedding_gain) and self.embedding_gain > 0):
            raise InputError(f"Hydra heads need an embedding_gain above 0, not {self.embedding_gain}.")
        if self.layer is None and (self.prefix_attention or self.sees == "fusion"):
            raise InputError("Hydra heads with attention need the shape of their attention layer.")
        if self.root_in_prefix and not self.prefix_attention:
            raise InputError(
                "Hydra heads with root_in_prefix need prefix_attention: there is no layer to read the root."
            )

    def embeddings_seen(self, head: int) -> int:
        """Vectors beside h_t that head number `head`, from 0, reads."""
        if head == 0 and not self.root_in_first:
            return 0
        return head + 1 if self.sees == "path" else 1


class HydraBlock(nn.Module):
    """One head up to its projection; starts by handing h_t on unchanged."""

    def __init__(self, shape: HydraShape, head: int) -> None:
        super().__init__()
        hidden, width = shape.hidden, (1 + shape.embeddings_seen(head)) * shape.hidden
        self.linear = nn.Linear(width, hidden)
        self.shortcut = nn.Linear(width, hidden) if shape.arch == "mlp" else None
        self.norm = nn.LayerNorm(hidden) if shape.arch == "guide" else None
        self.second = nn.Linear(hidden, hidden) if shape.arch == "guide" else None
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(shape.num_layers - 1))
        zeroed = [self.linear if self.second is None else self.second, *self.layers]
        with torch.no_grad():
            for linear in zeroed:
                linear.weight.zero_()
                linear.bias.zero_()
            if self.shortcut is not None:
                self.shortcut.weight.zero_()
                self.shortcut.weight[:, :hidden] = torch.eye(hidden)
                self.shortcut.bias.zero_()

    def forward(self, state: Float[Tensor, "*rows hidden"], seen: Float[Tensor, "*rows width"]) -> Tensor:
        """Features of rows that read `state` = h_t and `seen` = h_t with the embeddings behind it."""
        inner = functional.silu(self.linear(seen))
        if self.shortcut is not None:
            features: Tensor = self.shortcut(seen) + inner
        else:
            assert self.norm is not None and self.second is not None
            features = state + self.second(self.norm(inner))
        for layer in self.layers:
            features = features + functional.silu(layer(features))
        return features


class HydraBlocks(nn.Module):
    """The trained part of Hydra and Hydra++ heads, own projections excepted."""

    def __init__(self, shape: HydraShape, *, gain: float = 1.0, projection: Tensor | None = None) -> None:
        """`gain` is the size of the target's hidden states; attention starts by handing states of that size on."""
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(HydraBlock(shape, head) for head in range(shape.num_heads))
        self.prefix, self.fusion = None, None
        if shape.layer is not None and shape.prefix_attention:
            self.prefix = DecoderLayer(shape.hidden, shape.layer, gain=gain)
        self.prefix_root = nn.Linear(shape.hidden, shape.hidden, bias=False) if shape.root_in_prefix else None
        if self.prefix_root is not None:
            nn.init.zeros_(self.prefix_root.weight)
        if shape.layer is not None and shape.sees == "fusion":
            self.fusion = DecoderLayer(shape.hidden, shape.layer, gain=gain)
        copies = None if projection is None else nn.Parameter(projection.repeat(shape.num_heads, 1, 1))
        self.projection: Float[Tensor, "heads vocab hidden"] | None = copies
        self.projection_bias: Float[Tensor, "heads vocab"] | None = None

    @property
    def num_heads(self) -> int:
        """Draft heads, one per depth."""
        return self.shape.num_heads

    @property
    def reads_prefix(self) -> bool:
        """Whether `read_prefix` mixes positions."""
        return self.prefix is not None

    def read_prefix(
        self,
        states: Float[Tensor, "batch positions hidden"],
        following: Float[Tensor, "batch positions hidden"] | None = None,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "batch positions read"]:
        """What heads read at each position of whole texts.

        The states; the prefix layer's output in their place; or where it reads the root, both side by side.
        `following` are the embeddings of the tokens after each position, for a layer that reads them.
        """
        if self.prefix is None:
            return states
        output: Tensor = self.prefix(self.prefix_inputs(states, following), mask=mask)
        return output if self.prefix_root is None else torch.cat([states, output], dim=-1)

    def prefix_inputs(
        self,
        states: Float[Tensor, "batch positions hidden"],
        following: Float[Tensor, "batch positions hidden"] | None,
    ) -> Float[Tensor, "batch positions hidden"]:
        """What the prefix layer reads at each position."""
        if self.prefix_root is None:
            return states
        assert following is not None
        read: Tensor = self.prefix_root(functional.rms_norm(following, following.shape[-1:]))
        return states + read

    def head(
        self, head: int, features: Float[Tensor, "*rows read"], path: Float[Tensor, "*rows seen hidden"]
    ) -> Float[Tensor, "*rows hidden"]:
        """What head number `head`, from 0, hands to its projection.

        `path` holds the embeddings of the root and the drafted tokens before this head, `head + 1` of them.
        """
        path = path * self.shape.embedding_gain
        if self.fusion is not None:
            texts = torch.cat([self._state(1, features)[..., None, :], path], dim=-2)
            flat = texts.reshape(-1, *texts.shape[-2:])
            path = self.fusion(flat)[:, -1:].reshape(*features.shape[:-1], 1, -1)
        seen = self.shape.embeddings_seen(head)
        return self._handed(head, features, path[..., path.shape[-2] - seen :, :])

    def true_path(
        self, features: Float[Tensor, "rows read"], path: Float[Tensor, "rows depth hidden"], heads: int
    ) -> Float[Tensor, "heads rows hidden"]:
        """What the first `heads` heads hand to their projection, each under the true path."""
        path, fused = path * self.shape.embedding_gain, None
        if self.fusion is not None:
            fused = self.fusion(torch.cat([self._state(1, features)[:, None], path[:, :heads]], dim=1))
        outputs = []
        for head in range(heads):
            seen = self.shape.embeddings_seen(head)
            read = path[:, head + 1 - seen : head + 1] if fused is None else fused[:, head + 2 - seen : head + 2]
            outputs.append(self._handed(head, features, read))
        return torch.stack(outputs)

    def _handed(
        self, head: int, features: Float[Tensor, "*rows read"], seen: Float[Tensor, "*rows seen hidden"]
    ) -> Float[Tensor, "*rows hidden"]:
        block: HydraBlock = self.heads[head]  # type: ignore[assignment]
        state = self._state(head, features)
        handed: Tensor = block(state, torch.cat([state, seen.flatten(-2)], dim=-1))
        return handed

    def _state(self, head: int, features: Float[Tensor, "*rows read"]) -> Float[Tensor, "*rows hidden"]:
        """h_t, or the prefix layer's output where it stands in its place; features end in the latter."""
        return features[..., : self.shape.hidden] if head == 0 else features[..., -self.shape.hidden :]


class HydraHeads:
    """Hydra or Hydra++ heads bound to their target; satisfies `DraftHeads`.

    Args:
        blocks: the trained part, taken over: moved to the target's device, frozen, fused and packed where that is
            faster.
        target: whose states and embeddings they read.
        identity: who they are.
        token_map: `[columns]` target ids of a shortlist, ascending.
        dtype: precision of the heads, the target's own by default.
    """

    cost = DraftCost.PER_DEPTH
    path_local = True

    def __init__(
        self,
        blocks: HydraBlocks,
        target: Target,
        identity: HeadsIdentity,
        *,
        token_map: Int[Tensor, " columns"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype or target.dtype
        self.blocks = blocks.to(device=target.device, dtype=self.dtype).eval().requires_grad_(False)
        self.projection = Projection(target, weight=blocks.projection, bias=blocks.projection_bias, token_map=token_map)
        for layer in filter(None, (self.blocks.prefix, self.blocks.fusion)):
            layer.fuse()
        pack_linears(self.blocks)
        self.target = target
        self.identity = identity

    @property
    def reads_prefix(self) -> bool:
        """See `DraftHeads`."""
        return self.blocks.prefix is not None

    @property
    def token_map(self) -> Int[Tensor, " columns"] | None:
        """See `DraftHeads`."""
        return self.projection.token_map

    def features(
        self, states: Float[Tensor, "positions hidden"], following: Int[Tensor, " positions"]
    ) -> Float[Tensor, "positions read"]:
        """See `DraftHeads`."""
        read = states.to(device=self.target.device, dtype=self.dtype)[None]
        if self.blocks.prefix_root is not None:
            self._require_known(following)
        return self.blocks.read_prefix(read, self._embedded(following[None]))[0]

    def new_context(self, capacity: int, *, batch: int = 1) -> DraftContext:
        """See `DraftHeads`."""
        if self.blocks.prefix is None:
            return LastState()
        return PrefixContext(
            self.blocks.prefix,
            self._prefix_inputs,
            capacity,
            beside_state=self.blocks.prefix_root is not None,
            batch=batch,
            dtype=self.dtype,
            device=self.target.device,
        )

    def propose(
        self,
        features: Float[Tensor, "batch read"],
        roots: Int[Tensor, " batch"],
        plan: TreePlan,
        noise: Float[Tensor, "batch depth vocab"] | None = None,
    ) -> Int[Tensor, "batch nodes"]:
        """See `DraftHeads`: one call per depth, over all expanded nodes of it."""
        tokens = roots.new_zeros(roots.shape[0], plan.verify_width)
        tokens[:, 0] = roots
        features = features.to(self.dtype)
        for head, level in enumerate(plan.levels):
            path = self.target.embed(tokens[:, level.paths]).to(self.dtype)
            read = features[:, None].expand(-1, level.paths.shape[0], -1)
            handed = self.blocks.head(head, read, path)
            shared = None if noise is None else noise[:, head].repeat_interleave(read.shape[1], dim=0)[None]
            lists = self.projection.top(handed.flatten(0, 1)[None], level.ranks, first_head=head, noise=shared)
            lists = lists.view(roots.shape[0], -1, level.ranks)
            tokens[:, level.children] = lists[:, level.parent_rows, level.child_ranks]
        return tokens[:, 1:]

    def path_scores(
        self, features: Float[Tensor, "rows read"], tokens: Int[Tensor, "rows depth"]
    ) -> Float[Tensor, "rows depth columns"]:
        """See `DraftHeads`."""
        device = self.target.device
        self._require_known(tokens)
        path = self.target.embed(tokens.to(device)).to(self.dtype)
        handed = self.blocks.true_path(features.to(device=device, dtype=self.dtype), path, tokens.shape[1])
        return self.projection.scores(handed).transpose(0, 1)

    def _prefix_inputs(
        self, states: Float[Tensor, "batch count hidden"], following: Int[Tensor, "batch count"]
    ) -> Float[Tensor, "batch count hidden"]:
        return self.blocks.prefix_inputs(states.to(self.dtype), self._embedded(following))

    def _embedded(self, following: Int[Tensor, "batch count"]) -> Float[Tensor, "batch count hidden"] | None:
        """Embeddings that the prefix layer reads, or None where it reads none."""
        if self.blocks.prefix_root is None:
            return None
        return self.target.embed(following.to(self.target.device)).to(self.dtype)

    def _require_known(self, tokens: Int[Tensor, "*rows"]) -> None:
        """An id beyond the table would end the process on an accelerator, so it is looked for before."""
        table: Tensor = self.target.input_embeddings.weight  # type: ignore[assignment]
        rows = table.shape[0]
        outside = tokens[(tokens < 0) | (tokens >= rows)]
        if len(outside):
            raise InputError(f"The text has token id {int(outside[0])}, outside the target's {rows} embeddings.")


def untrained_hydra(target: Target, shape: HydraShape, *, share_projection: bool, gain: float = 1.0) -> HydraBlocks:
    """Heads at their starting point: each repeats the target's next-token scores.

    `gain` is the root mean square of the target's hidden states, which attention layers start by keeping.
    """
    return HydraBlocks(shape, gain=gain, projection=None if share_projection else target.output_weight)


def embedding_size(target: Target) -> float:
    """Root mean square of the target's input embeddings, over at most 4,096 tokens taken evenly."""
    ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 4096), device=target.device)
    return float(target.embed(ids).float().pow(2).mean().sqrt())
