"""Chat templates of strangers: they write what transformers writes, and end where they take too much."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.fuzz import memory_below

from zoo.config.locate import check_side_files
from zoo.data.template_limits import TemplateLimitError, _limited, limit_templates
from zoo.data.tokenizer import ROOT
from zoo.errors import ConfigError

GROWING = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = GROWN %}{% endfor %}{{ ns.s }}"
GREEDY = [
    "{{ 'x' * 20000000000 }}",
    "{{ 20000000000 * 'x' }}",
    "{{ ([1] * 20000000000)|length }}",
    "{{ 'x'|center(20000000000) }}",
    "{{ 'x'|indent(20000000000, true) }}",
    "{{ 'x'.ljust(20000000000) }}",
    "{{ 'x'.zfill(20000000000) }}",
    "{{ '%20000000000d' % 1 }}",
    "{{ '%20000000000d'|format(1) }}",
    "{{ '%*d'|format(20000000000, 1) }}",
    "{{ ('%999999d' * 1000) % ((1,) * 1000) }}",
    "{{ '{:>20000000000}'.format(1) }}",
    "{{ '{:x>{w}}'.format(1, w=20000000000) }}",
    "{{ ('{0}' * 1000).format('x' * 1000000) }}",
    "{{ (10).to_bytes(20000000000) }}",
    "{{ 9 ** 99999 }}",
    "{{ [1]|batch(20000000000, 'x')|list }}",
    "{{ messages|tojson(indent=20000000000) }}",
    "{{ (messages|map('center', 20000000000))|list }}",
    "{{ (['x' * 1000000] * 1000)|tojson }}",
    "{{ ['x' * 1000000] * 1000 }}",
    "{{ (['x' * 1000000] * 1000)|join }}",
    "{{ ('y' * 1000000).join(range(99999)|map('string')) }}",
    "{{ ('a' * 1000)|replace('a', 'b' * 1000)|replace('b', 'c' * 1000) }}",
    "{% set s = 'x' * 1000000 %}{{ " + " ~ ".join(["s"] * 1000) + " }}",
    *(GROWING.replace("GROWN", grown) for grown in ("ns.s ~ ns.s", "ns.s + ns.s", "[ns.s, ns.s]", "[ns.s, ns.s]|join", "'%s%s' % (ns.s, ns.s)")),
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]  # fmt: skip
MODEST = [
    "{% for m in messages %}{{ m.role.upper() + ': ' }}{{ m.content|trim }}{{ ' ' }}{% endfor %}",
    "{{ messages|tojson(indent=2) }}{{ tools|tojson }}{{ messages[0] }}{{ none }}{{ 1.5 }}{{ true }}{{ [1, 'a'] }}",
    "{% for m in messages[::-1] %}{{ loop.index0 ~ '/' ~ loop.length ~ m.content.split('</think>')[-1].lstrip('\\n') }}{% if loop.first %}{% continue %}{% endif %}x\n{% endfor %}",
    "{% macro say(m, end='.') -%}{{ m.content|replace('a', 'bb') }}{{ caller() if caller else end }}{%- endmacro %}{% for m in messages %}{{ say(m) }}{% call say(m) %}?{% endcall %}{% endfor %}",
    "{% set ns = namespace(n=0, s='') %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 2 * 3 % 4 ** 2 %}{% set ns.s %}{{ ns.s }}<{{ m.content }}>{% endset %}{% endfor %}{{ ns.n }}{{ ns.s|length }}{{ ns.s }}",
    "{{ '%-5s|%3d|%.2f' % ('a', 7, 1.5) }}{{ '%s and %s'|format('a', 'b') }}{{ '{:>4}{x}'.format(7, x='y') }}{{ ', '.join(['a', 'b']) }}{{ ['a', 'b']|join('-') }}{{ 'x' * 3 }}",
    "{{ messages|map(attribute='content')|join(', ')|upper|indent(2) }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ ('a' ~ 'b')|e }}{{ {'a': 1}.items()|list }}{% filter upper %}x{{ 'y' }}{% endfilter %}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k ~ v }}{% else %}none{% endfor %}",
]  # fmt: skip
CHAT = [{"role": ("user", "assistant")[n % 2], "content": f" a{n} <think>\nb\n</think>\n\nc "} for n in range(6)]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, None, "é"]}}}]


@pytest.fixture
def environment() -> Any:
    """transformers' own, without limits."""
    from transformers.utils.chat_template_utils import _cached_compile_jinja_template

    return _cached_compile_jinja_template("").environment


@pytest.mark.parametrize("template", GREEDY)
def test_a_template_that_takes_too_much_is_refused_soon(template: str, environment: Any) -> None:
    begin = time.process_time()
    with memory_below(1024), pytest.raises(TemplateLimitError, match="the chat template"):
        _limited(environment, template).render(messages=CHAT)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("template", MODEST)
def test_other_templates_write_what_transformers_writes(template: str, environment: Any) -> None:
    given = {"messages": CHAT, "tools": TOOLS, "add_generation_prompt": True}
    assert _limited(environment, template).render(**given) == environment.from_string(template).render(**given)


def test_the_bundled_template_and_long_chats(environment: Any) -> None:
    """4,096 turns, and texts of 4 MiB, are within the limits."""
    template = (Path(ROOT) / "chat_template.jinja").read_text()
    for chat in (
        CHAT,
        CHAT * 682,
        [{"role": "user", "content": "word " * 800_000}, {"role": "assistant", "content": "a"}],
    ):
        given = {"messages": chat, "tools": TOOLS, "add_generation_prompt": False}
        assert _limited(environment, template).render(**given) == environment.from_string(template).render(**given)


def test_transformers_renders_under_limits() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_templates()
    with pytest.raises(TemplateLimitError):
        render_jinja_template([CHAT], chat_template=GREEDY[0])


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 10**9, "longest_edge": 10**10}},
        {"size": {"shortest_edge": 10**5}},
        {"size": {"height": 10**9, "width": 8}},
        {"image_processor": {"min_pixels": 10**9}},
        {"crop_size": 10**6},
        {"size": [10**6, 10**6]},
        {"image_grid_pinpoints": [[336, 10**7]]},
        {"feature_extractor": {"chunk_length": 10**6}},
        {"n_fft": 10**9},
        {"size": {"height": float("nan")}},
        {"size": {"height": 10**400}},
    ],
)
def test_sizes_that_no_processor_has_are_refused(name: str, settings: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_side_files(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16},
        {"size": {"shortest_edge": 3136, "longest_edge": 90316800}, "min_pixels": 3136, "max_pixels": 12845056},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"image_grid_pinpoints": [[2304, 2304]], "size": {"height": 384, "width": 384}},
        {
            "size": {"shortest_edge": None},
            "max_patches": 12,
            "n_samples": 4800000,
            "nb_max_frames": 30000,
            "chunk_length": 300,
        },
    ],
)
def test_published_sizes_are_read(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    check_side_files(tmp_path)
