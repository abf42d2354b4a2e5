"""Chat templates that write what those of the published checkpoints write, for turns of text, images, videos and sound.

Written down here from what the published ones do, without their tools: what matters to labels is how turns open and end,
what is trimmed, and what becomes of thinking.
"""

from __future__ import annotations

PARTS = (  # a content, a string or parts, as text
    "{%- macro said(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}"
    "{%- elif part.type == 'audio' -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}"
    "{%- else -%}{{- '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
INSTRUCT = (  # Qwen3-VL-*-Instruct
    PARTS + "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ said(m.content) ~ '<|im_end|>\\n' -}}"
    "{%- endfor -%}" + PROMPT
)

INTERNVL = (  # InternVL3_5-*-HF: the processor writes what stands around media; a line break behind each
    INSTRUCT.replace("'<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>'", "'<|' ~ part.type ~ '_pad|>\\n'")
)
QWEN25 = (  # Qwen2.5-VL-*-Instruct: a system turn where the chat begins with none
    PARTS + "{%- if messages[0].role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    + INSTRUCT.removeprefix(PARTS)
)

QWEN3_ASR = (  # Qwen3-ASR-*-hf: all systems' text, all sound, then the answers; what the user says is left out
    "{%- set ns = namespace(system='', sound='') -%}{%- for m in messages -%}"
    "{%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}"
    "{%- if part.type == 'audio' -%}{%- set ns.sound = ns.sound ~ '<|audio_start|><|audio_pad|><|audio_end|>' -%}"
    "{%- elif m.role == 'system' -%}{%- set ns.system = ns.system ~ part.text -%}{%- endif -%}{%- endfor -%}{%- endfor -%}"
    "{{- '<|im_start|>system\\n' ~ ns.system ~ '<|im_end|>\\n<|im_start|>user\\n' ~ ns.sound ~ '<|im_end|>\\n' -}}"
    "{%- for m in messages if m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' -}}{% generation %}"
    "{{- (m.content if m.content is string else m.content[0].text) ~ '<|im_end|>\\n' -}}{% endgeneration %}{%- endfor -%}"
    + PROMPT
)

GEMMA3 = (  # gemma-3-*-it, with the bundled turn markers: the system turn opens the user's, answers are trimmed
    "{%- macro said(content) -%}{%- if content is string -%}{{- content | trim -}}{%- else -%}"
    "{%- for part in content -%}{%- if part.type == 'image' -%}{{- '<|vision_start|>' -}}"
    "{%- else -%}{{- part.text | trim -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- set system = said(messages[0].content) ~ '\\n\\n' if messages[0].role == 'system' else '' -%}"
    "{%- for m in messages if m.role != 'system' -%}{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
    "{{- (system if loop.first else '') ~ said(m.content) ~ '<|im_end|>\\n' -}}{%- endfor -%}" + PROMPT
)
GEMMA4 = (  # gemma-4-*-it without thinking, with the bundled markers: turns of a system are its own, answers are trimmed
    "{%- macro said(content) -%}{%- if content is string -%}{{- content | trim -}}{%- else -%}"
    "{%- for part in content -%}{%- if part.type == 'image' -%}{{- '<|image_pad|>' -}}"
    "{%- else -%}{{- part.text | trim -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ said(m.content) ~ '<|im_end|>\\n' -}}"
    "{%- endfor -%}" + PROMPT
)


def _thinking(trim: str, always: bool) -> str:
    """Earlier turns lose their thinking; the last answers have a block of it, an empty one too where `always`."""
    opened = "'<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ rest.lstrip('\\n')"
    written = f"({opened} if thought or {str(always).lower()} else rest)"
    return (
        PARTS + "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}{%- set text = said(m.content)" + trim + " -%}"
        "{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
        "{%- if m.role == 'assistant' -%}{%- set thought, rest = '', text -%}"
        "{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content"
        + trim
        + " -%}{%- elif '</think>' in text -%}"
        "{%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')" + trim + " -%}"
        "{%- set rest = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
        "{{- " + written + " if loop.index0 > ns.last else rest -}}"
        "{%- else -%}{{- text -}}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}{%- endfor -%}" + PROMPT
    )


THINKING = _thinking("", False)  # Qwen3-VL-*-Thinking and Qwen3-Omni's
QWEN3 = _thinking("", True)  # Qwen3's; Qwen3-*-Instruct-2507 and -Coder have INSTRUCT
QWEN35 = _thinking("|trim", True)  # Qwen3.5's
EFFORT = "Reasoning effort is set to xhigh."
QWEN38 = (  # Qwen3.8's: an instruction first, thinking under reasoning_content alone, and kept in all turns
    PARTS + "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- set effort = reasoning_effort | default('xhigh') -%}"
    "{%- if effort not in ('xhigh', 'medium', 'low') -%}{{- raise_exception('Unexpected reasoning effort') -}}{%- endif -%}"
    "{%- set system = said(messages[0].content) | trim if messages[0].role == 'system' else '' -%}"
    "{%- set first = ['Reasoning effort is set to ' ~ effort ~ '.'] if effort != 'medium' else [] -%}"
    "{%- set first = first + ([system] if system else []) -%}"
    "{%- if first -%}{{- '<|im_start|>system\\n' ~ first | join('\\n\\n') ~ '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages if m.role != 'system' -%}{%- set text = said(m.content) | trim -%}"
    "{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
    "{%- if m.role == 'assistant' and (preserve_thinking | default(true) or loop.index0 > ns.last) -%}"
    "{{- '<think>\\n' ~ (m.reasoning_content or '') | trim ~ '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- text ~ '<|im_end|>\\n' -}}{%- endfor -%}" + PROMPT
)
GLM45V = (  # GLM-4.5V: no turn has an end, the last answers have a block of thinking, earlier ones an empty one
    "{%- macro said(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'text' -%}{{- part.text -}}{%- elif part.type == 'image' -%}"
    "{{- '<|begin_of_image|><|image_pad|><|end_of_image|>' -}}{%- else -%}"
    "{{- '<|begin_of_video|><|video_pad|><|end_of_video|>' -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- set text = said(m.content) -%}"
    "{%- if m.role == 'assistant' -%}{%- set thought = '' -%}{%- if '</think>' in text -%}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() -%}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
    "{{- '<|assistant|>\\n<think>' ~ (thought if loop.index0 > ns.last else '') ~ '</think>' -}}"
    "{%- if text.strip() -%}{{- '\\n' ~ text.strip() -}}{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}{{- '\\n<tool_call>' ~ call.function.name ~ '</tool_call>' -}}{%- endfor -%}"
    "{%- elif m.role == 'tool' -%}{{- '<|observation|>\\n<tool_response>' ~ text ~ '</tool_response>' -}}"
    "{%- else -%}{{- '<|' ~ m.role ~ '|>\\n' ~ text -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
LLAVA_15 = (  # llava-1.5-*-hf: images first, a space behind each turn
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for p in m.content if p.type == 'image' %}{{ '<|image_pad|>\\n' }}{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
MISTRAL = (  # llava-v1.6-mistral-7b-hf
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<<SYS>>\\n' + m.content[0].text + '\\n<</SYS>>\\n\\n' }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' }}{% for p in m.content if p.type == 'image' %}{{ '<|image_pad|>\\n' }}{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{{ ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content[0].text + '<|im_end|> ' }}{% endif %}{% endfor %}"
)
ONEVISION = (  # llava-onevision-qwen2-*-ov-hf: a space behind the role, a line break before the text
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}"
    "{% for p in m.content if p.type == 'image' %}{{ '<|image_pad|>' }}{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ '\\n' + p.text }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
