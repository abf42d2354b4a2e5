"""transformers' own table of published names finds each of its weights in what zoo writes, for every kind of model."""

import re

import pytest
import torch
from support.config_keys import CASES, tiny_arch

from zoo.model.meta_model import build_meta_model

pytestmark = pytest.mark.sampled(9)


@pytest.mark.parametrize("case", CASES)
def test_transformers_finds_its_weights_by_the_names_that_zoo_writes(case: str) -> None:
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    arch = tiny_arch(case)
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[arch["model_type"]].from_dict(dict(arch))
        model = getattr(transformers, CASES[case].kind)(config)
    ours = build_meta_model(arch)
    bridge, dims = ours.bridge, ours.dims
    entries = [entry for entry in bridge.publish(ours.parameters).values() if entry.rule.writes(dims)]
    names = [name.removeprefix("thinker.") for name in bridge.published_names(entries, dims)]
    passed = model._keys_to_ignore_on_load_unexpected or ()
    table, wanted = get_model_conversion_mapping(model), dict(model.state_dict())
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    found = set()
    for name in names:
        there, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        found.add(name if there not in wanted and name in wanted else there)
    found = {name for name in found if not any(re.search(pattern, name) for pattern in passed)}
    assert len(names) > 40 and found == wanted.keys() - ({"lm_head.weight"} if dims.tied else set())
