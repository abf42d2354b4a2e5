"""A multimodal language model on mcore parts: embedding, towers, decoder, head.

A family subclasses `MultimodalModel`, gives it towers and says in `encode` what they make of a batch's media.
Which row each media embedding goes to is worked out on the host by the step and arrives in `ModelInputs`.

Data layout: hidden states are (T, B, hidden) as in mcore; B is 1 for packed rows. "Rows" are indices into
the flattened (T * B, hidden) states of this context-parallel rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from zoo.nn.autograd import recomputed
from zoo.nn.backend import decoder_layer, get_backend
from zoo.nn.decoder.attention.rotary import Rotary, RotaryShape
from zoo.nn.decoder.block import Decoder, Deepstack, NotedStates
from zoo.nn.decoder.experts.router import track_layers
from zoo.nn.decoder.mtp import MultiTokenPrediction
from zoo.nn.fp32 import as_held
from zoo.nn.head import LabelExchange, ScoreHead, clear_padding, without_padding  # fmt: skip
from zoo.nn.inputs import (
    Encoded,
    Media,
    ModelInputs,
    Placement,
    Stage,
    Vocabulary,
    label_losses,
    media_rows,
    on_device_of,
    put_rows,
)  # fmt: skip
from zoo.nn.towers.gather import GatherEncoded
from zoo.packing.cost import LABELS_AT_ONCE

type Rows = tuple[Tensor, ...]  # (N, hidden) each


class MultimodalModel(LanguageModule):
    """Embedding, towers, decoder and head of one pipeline stage. A subclass with towers gives `encode`."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocabulary: Vocabulary,
        rotary: RotaryShape,
        backend: str,
        stage: Stage,
        towers: Mapping[str, torch.nn.Module],
        deepstack_layers: Mapping[str, int] | None = None,
        local_rotary: RotaryShape | None = None,
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        """Build the modules of a stage.

        Args:
            towers: kept as attributes under their names, on the first stage only.
            deepstack_layers: by the name of a tower, decoder layers that its features are added after; ValueError for two towers.
            local_rotary: of layers that see a window, where these have their own.
            groups: default: megatron-core's.
        """
        groups = groups or ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config=config, pg_collection=groups)
        track_layers(config)
        self.model_type, self.groups = ModelType.encoder_or_decoder, groups
        self.pre_process, self.post_process, self.vp_stage = stage.first, stage.last, stage.vp_stage
        # mcore's names; with multi-token prediction the embedding is on the last stage, too
        self.mtp_process = stage.last and bool(config.mtp_num_layers)
        self.share_embeddings_and_output_weights = vocabulary.tied and not vocabulary.headless
        self.deepstack_layers = {name: n for name, n in (deepstack_layers or {}).items() if n}
        if len(named := sorted(self.deepstack_layers)) > 1:
            raise ValueError(f"deepstack_layers names {named}; one tower may have deepstack")
        self.vocabulary = vocabulary
        rows = -(-vocabulary.size // groups.tp.size())  # of this rank; the last ranks' are padded
        self.local_vocab = max(0, min(rows, vocabulary.size - rows * groups.tp.rank()))
        self.input_tensor: Tensor | None = None
        self.rotary = Rotary(rotary)
        self.local_rotary = None if local_rotary is None else Rotary(local_rotary)
        rows *= groups.tp.size()
        if not stage.towers_alone and (stage.first or self.mtp_process):
            embedding_config = copy.copy(config)
            embedding_config.hidden_size = vocabulary.width or config.hidden_size
            self.embedding = LanguageModelEmbedding(
                config=embedding_config,
                vocab_size=rows,
                max_sequence_length=0,
                position_embedding_type="none",
                scatter_to_sequence_parallel=False,  # media are placed first
                tp_group=groups.tp,
            )
        self.tower_modules = tuple(towers) if stage.first else ()
        for name, tower in towers.items() if stage.first else ():
            self.add_module(name, tower)
            for parameter in tower.parameters() if groups.tp.size() > 1 else ():
                setattr(parameter, "average_gradients_across_tp_domain", True)  # noqa: B010  # mcore sums: each rank encodes other media
        if stage.towers_alone:
            return
        self._build_layers(stage, get_backend(backend, config), rows)
        if stage.first or stage.last:
            clear_padding(self, self.local_vocab)
            self.setup_embeddings_and_output_layer()

    def _build_layers(self, stage: Stage, provider: BackendSpecProvider, rows: int) -> None:
        """The decoder, then on the last stage the head of `rows` tokens over all ranks, and multi-token prediction."""
        config, groups, (sparse, linear) = self.config, self.groups, _layer_kinds(self.config)
        first = get_transformer_layer_offset(config, stage.vp_stage)
        layers = [
            decoder_layer(config, provider, experts=bool(sparse[i]), linear=bool(linear[i]))
            for i in range(first, first + get_num_layers_to_build(config, stage.vp_stage))
        ]
        self.decoder = Decoder(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True)),
            pre_process=stage.first,
            post_process=stage.last,
            pg_collection=groups,
            vp_stage=stage.vp_stage,
        )
        if stage.last and self.vocabulary.scores:
            self.score = ScoreHead(config)
        elif stage.last and not self.vocabulary.embeds:
            head_config = copy.copy(config)
            head_config.sequence_parallel = False  # rows are gathered, then only labelled ones kept
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                rows,
                config=head_config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=self.vocabulary.tied and (stage.first or self.mtp_process),
                tp_group=groups.tp,
            )
        if self.mtp_process:
            # Softmax attention, with experts where the last layer has them. Not `mtp`: mcore's schedules look inside that.
            layer = decoder_layer(config, provider, experts=bool(sparse[-1]))
            self.multi_token = MultiTokenPrediction(config, provider, layer, groups)

    @property
    def routed_configs(self) -> tuple[TransformerConfig, ...]:
        """The configs of the decoders whose routers' losses are logged."""
        return (self.config,)

    def encode(self, media: Media) -> dict[str, Encoded]:
        """Tower outputs by tower name, without towers that have no media in this batch: none of a decoder alone."""
        return {}

    @as_held()
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """As megatron-core's, which expects a vocabulary's head; vocabularies have their own sizes, without padding."""
        parent = MegatronModule if self.vocabulary.headless else LanguageModule
        sharded: ShardedStateDict = parent.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        own = (f"{prefix}embedding.", f"{prefix}output_layer.")  # and not those of a decoder within this one
        for name, entry in sharded.items():
            if name.startswith(own) and getattr(entry, "allow_shape_mismatch", False):
                entry.global_shape = (self.vocabulary.size, *entry.global_shape[1:])
        return sharded

    shared_embedding_or_output_weight = as_held()(LanguageModule.shared_embedding_or_output_weight)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """mcore's schedules hand over what the previous stage sent."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, inputs: ModelInputs, noted: NotedStates | None = None) -> Tensor:
        """One pipeline stage; `noted`: states within the decoder that are wanted besides.

        Last stage: negative log likelihood (N,) fp32 of the targets, then of those of each depth of multi-token
        prediction; with `count_correct` (2, N), the second row 1.0 where the target was the most likely token, with `entropy`
        (2, N), the second row the entropy, with `distillation` the divergence from the teacher; with `top` what `TopTokens.joined` gives;
        without `targets` the logits (N, vocab) of `label_rows`, or their scores (N,) or states (N, hidden), without these too all logits (B, T, vocab).
        Other stages: what the next one needs, (T', B, hidden).
        """
        hidden, features, mtp_media = self.decode(inputs, noted)
        if not self.post_process:
            return joined(hidden, (*features, *mtp_media))
        losses = [self._head(hidden, inputs.label_rows, inputs.targets, inputs.label_exchange, inputs)]
        for depth, (mtp_inputs, media) in enumerate(zip(inputs.mtp, mtp_media, strict=True)):
            embedded = self._embedded(mtp_inputs.input_ids)
            rows = [placement.rows for placement in mtp_inputs.placements.values()]
            if rows:
                embedded = put_rows(embedded, on_device_of(torch.cat(rows), embedded), media)
            if self.config.sequence_parallel:
                embedded = scatter_to_sequence_parallel_region(embedded, group=self.tp_group)
            mask, rotary = self._local_mask(mtp_inputs.padding_mask), self.rotary(inputs.positions)
            hidden = self.multi_token(depth, hidden, embedded, rotary, inputs.seq_params, mask)
            losses.append(self._head(hidden, mtp_inputs.label_rows, mtp_inputs.targets, mtp_inputs.label_exchange))
        return torch.cat(losses, dim=-1) if inputs.mtp else losses[0]

    def decode(self, inputs: ModelInputs, noted: NotedStates | None) -> tuple[Tensor, Rows, Rows]:
        """Run the layers of a stage: states (T', B, hidden), deepstack features that later stages add, and the media of each depth."""
        hidden, deepstack, mtp_media = (self._embed if self.pre_process else self._receive)(inputs)
        rotary = self.rotary(inputs.positions)
        local = None if self.local_rotary is None else self.local_rotary(inputs.positions)
        mask, routing = self._local_mask(inputs.padding_mask), inputs.routing
        if routing is not None and self.config.sequence_parallel:
            routing = routing.part(self.tp_group.rank(), self.tp_group.size())
        most = inputs.most_tokens
        hidden = self.decoder(hidden, rotary, inputs.seq_params, mask, deepstack, routing, local, most, noted)
        features = deepstack.after(self.decoder.last_layer).features if deepstack else ()
        return hidden, features, mtp_media

    def _local_mask(self, mask: Tensor | None) -> Tensor | None:
        """(B, T) of this context-parallel rank -> its share under sequence parallelism."""
        if mask is None or not self.config.sequence_parallel:
            return mask
        return mask.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]

    def _embedded(self, ids: Tensor) -> Tensor:
        """(T, B, hidden) embeddings of tokens (B, T)."""
        hidden: Tensor = self.embedding(input_ids=ids, position_ids=None)
        scale = self.vocabulary.embedding_scale
        # In the weights' precision, as in transformers: sqrt(3072) is 55.5 in bf16.
        return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=hidden.dtype).item()

    def _embed(self, inputs: ModelInputs) -> tuple[Tensor, Deepstack | None, Rows]:
        """Hidden states, deepstack features, and the embeddings of media for each depth of multi-token prediction."""
        hidden = self._embedded(inputs.input_ids)
        encoded = self.encode(inputs.media) if inputs.media else {}
        for name, longest in inputs.shared.items():
            encoded[name] = self._gather(name, encoded.get(name), longest, hidden)
        encoded |= {name: Encoded.split(joined, hidden.shape[-1]) for name, joined in (inputs.encoded or {}).items()}
        deepstack: Deepstack | None = None
        for name, placement in inputs.placements.items():
            rows = on_device_of(placement.rows, hidden)
            source = on_device_of(placement.source, hidden)
            hidden = put_rows(hidden, rows, encoded[name].embeddings.index_select(0, source))
            if encoded[name].deepstack:
                deepstack = self._local_deepstack(placement, encoded[name], hidden)
        if self.training and torch.is_grad_enabled():
            for name in self.tower_names() if inputs.encoded is None else ():
                if name not in encoded:  # a gradient of zero, so that no rank waits for that of an idle tower
                    hidden = hidden + self.zero_of(name)
            if not hidden.requires_grad:  # recomputed layers wait for it, which a frozen embedding doesn't ask for
                hidden = hidden.requires_grad_()
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden, deepstack, tuple(media_rows(depth.placements, encoded, hidden) for depth in inputs.mtp)

    def _gather(self, name: str, encoded: Encoded | None, longest: int, hidden: Tensor) -> Encoded:
        """What all ranks of the group encoded with a tower, `longest` rows a rank; `encoded` is None without an item."""
        width = hidden.shape[-1]
        layers = self.deepstack_layers.get(name, 0)
        if encoded is None:  # part of the graph all the same: the backward pass is collective
            local = hidden.new_zeros(0, width * (1 + layers)) + self.zero_of(name)
        else:
            local = encoded.joined().to(hidden.dtype)
        everyone: Tensor = GatherEncoded.apply(local, longest, self.groups)
        return Encoded.split(everyone, width)

    def _local_deepstack(self, placement: Placement, encoded: Encoded, hidden: Tensor) -> Deepstack:
        """Features of the rows that this rank holds, as its share of the sequence counts them."""
        rows, keep = self._local_rows(placement, hidden.shape[0], hidden.shape[1])
        features = encoded.deepstack
        if self.config.sequence_parallel:
            # Each rank adds its own rows only, so the towers' gradient is summed here over the ranks: what
            # the scatter of the embeddings does for them.
            features = tuple(copy_to_tensor_model_parallel_region(f, group=self.tp_group) for f in features)
        source = on_device_of(placement.source[keep], hidden)
        features = tuple(feature.index_select(0, source) for feature in features)
        return Deepstack(on_device_of(rows, hidden), features)

    def _local_rows(self, placement: Placement, tokens: int, batch: int) -> tuple[Tensor, Tensor]:
        """(rows within this rank's share of `tokens`, mask of which placements those are), on the host."""
        if not self.config.sequence_parallel:
            return placement.rows, torch.ones_like(placement.rows, dtype=torch.bool)
        share = tokens // self.tp_group.size() * batch
        start = share * self.tp_group.rank()
        keep = (placement.rows >= start) & (placement.rows < start + share)
        return placement.rows[keep] - start, keep

    def zero_of(self, name: str) -> Tensor | float:
        """Zero that every trained parameter of a tower gets a zero gradient from."""
        parameters = [p for p in getattr(self, name).parameters() if p.requires_grad]
        return sum((p.flatten()[0] * 0.0 for p in parameters), start=0.0)

    def tower_names(self) -> tuple[str, ...]:
        """Names of the towers that `encode` may return; a family says which."""
        return ()

    def _receive(self, inputs: ModelInputs) -> tuple[Tensor, Deepstack | None, Rows]:
        """Take apart what the previous stage sent: hidden states, what is left of deepstack, depths' media."""
        assert self.input_tensor is not None
        batch, tokens = inputs.input_ids.shape
        local = tokens // self.tp_group.size() if self.config.sequence_parallel else tokens
        hidden, rest = self.input_tensor[:local], self.input_tensor[local:]
        first = get_transformer_layer_offset(self.config, self.vp_stage)
        rows, count = torch.empty(0), 0
        for name, layers in self.deepstack_layers.items():
            if name in inputs.placements:
                rows, _ = self._local_rows(inputs.placements[name], tokens, batch)
                count = max(0, layers - first)
        media = [sum(len(p.rows) for p in depth.placements.values()) for depth in inputs.mtp]
        sizes = [len(rows)] * count + media
        pieces = rest.reshape(-1, hidden.shape[-1])[: sum(sizes)].split(sizes)
        deepstack = Deepstack(on_device_of(rows, hidden), tuple(pieces[:count]), first) if count else None
        return hidden, deepstack, tuple(pieces[count:])

    def _head(
        self,
        hidden: Tensor,
        rows: Tensor | None,
        targets: Tensor | None,
        exchange: LabelExchange | None = None,
        inputs: ModelInputs | None = None,
    ) -> Tensor:
        """Losses of the rows that predict a label, or logits; with `inputs` what else `forward` says."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight().to(hidden.dtype) if tied else None
        states = hidden.reshape(-1, hidden.shape[-1])
        if targets is None:
            states = hidden if rows is None else states.index_select(0, rows)
            if self.vocabulary.headless:
                return states if self.vocabulary.embeds else self.score(states)
            logits = gather_from_tensor_model_parallel_region(self._logits(states, weight), group=self.tp_group)
            logits = logits[..., : self.vocabulary.size]
            return logits.transpose(0, 1) if rows is None else logits
        assert rows is not None
        count, first = len(targets), states[:1]
        states = states.index_select(0, rows)
        if exchange is not None:
            states = exchange(states)
        if count == 0:  # the head runs all the same: its gradient is waited for, and that of what was sent
            states, targets = torch.cat((states, first)), targets.new_zeros(1)
            inputs = inputs and replace(inputs, temperature=1.0, distillation=None)
        if count > LABELS_AT_ONCE:  # whose logits would be larger than all else of the row
            chunks = [slice(start, start + LABELS_AT_ONCE) for start in range(0, count, LABELS_AT_ONCE)]
            every = [
                recomputed(self._losses, states[rows], targets[rows], weight, inputs and inputs.labels(rows))
                for rows in chunks
            ]
            return torch.cat(every, dim=min(1, every[0].ndim - 1))
        out = self._losses(states, targets, weight, inputs)
        if count:
            return out
        return out[:, :0] if out.ndim == 3 else out[..., :0] + out.sum() * 0.0

    def _losses(self, states: Tensor, targets: Tensor, weight: Tensor | None, inputs: ModelInputs | None) -> Tensor:
        """`label_losses` of states (N, hidden)."""
        return label_losses(self._logits(states, weight), targets, inputs, self.tp_group)

    def _logits(self, states: Tensor, weight: Tensor | None) -> Tensor:
        """(..., vocab/tp) of states (..., hidden)."""
        logits: Tensor = self.output_layer(states, weight=weight)[0]
        cap = self.vocabulary.logit_softcap
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        return without_padding(logits, self.local_vocab)


def _layer_kinds(config: TransformerConfig) -> tuple[list[int], list[int]]:
    """Per decoder layer, whether it has experts, and whether its attention is linear."""
    none = [0] * config.num_layers
    sparse = config.moe_layer_freq if config.num_moe_experts else none
    linear = config.linear_attention_freq or none
    assert isinstance(sparse, list) and isinstance(linear, list)
    return sparse, linear


def joined(hidden: Tensor, pass_through: Rows) -> Tensor:
    """Hidden states and the rows (N, hidden) that later stages need, in one tensor for the pipeline."""
    if not pass_through:
        # mcore's schedules free what was sent, which they refuse for a view: deepstack rows added last leave one.
        return make_viewless_tensor(hidden, requires_grad=hidden.requires_grad, keep_graph=True)
    batch, width = hidden.shape[1:]
    features = torch.cat([rows.to(hidden.dtype) for rows in pass_through])
    short = -len(features) % batch
    if short:
        features = torch.cat((features, features.new_zeros(short, width)))
    return torch.cat((hidden, features.view(-1, batch, width).to(hidden.dtype)))
