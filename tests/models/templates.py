"""Chat templates in the manner of well-known model families, written for these tests.

Each keeps what makes its family special: where the beginning-of-text token comes from, what a
generation prompt ends in, what happens to thoughts and to roles that it does not know.
"""

from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from instruct_goose.models.tokens import bpe_tokenizer


class Family(NamedTuple):
    "A template and the tokenizer's habits that go with it."

    template: str
    bos: str
    eos: str
    specials: tuple[str, ...] = ()  # other special tokens
    adds_bos: bool = False  # the tokenizer's own call writes the bos as well
    takes_system: bool = True
    begins_thinking: bool = False  # the generation prompt ends in an opened thought


CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

# A system message of its own, where there is none.
SMOLLM2 = """\
{%- for m in messages %}\
{%- if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\n' + 'You are a helpful AI assistant.<|im_end|>\n' }}{%- endif %}\
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' %}\
{%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}\
{%- set turns = messages[1:] %}{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}\
{%- for m in turns %}\
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{%- endif %}\
{%- set content = (system if loop.index0 == 0 else '') + m['content'] %}\
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{%- elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{%- endif %}\
{%- endfor %}"""

LLAMA3 = """\
{%- for m in messages %}\
{%- set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}\
{%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}{{ content }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# The system's words stand in the last user's turn.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}\
{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}\
{{ bos_token }}\
{%- for m in turns %}\
{%- if m['role'] == 'user' %}\
{%- if loop.index0 >= turns | length - 2 and system is defined and m == (turns | selectattr('role', 'equalto', 'user') | list)[-1] %}\
{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}\
{%- else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}\
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}\
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{%- endif %}\
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}\
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}\
{%- for m in messages %}\
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}\
{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"""

# A role that it does not know is dropped without a word; the end of text comes after all turns.
PHI3 = """\
{%- for m in messages %}\
{%- if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + '<|end|>\n' }}\
{%- elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}\
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- else %}{{ eos_token }}{%- endif %}"""

# Thoughts stay in the turns after the last question and go from those before it.
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\n' }}\
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{%- endif %}\
{{ '# Tools\n<tools>' }}{%- for tool in tools %}{{ '\n' + tool | tojson }}{%- endfor %}\
{{ '\n</tools><|im_end|>\n' }}\
{%- elif messages[0]['role'] == 'system' %}\
{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- endif %}\
{%- set ns = namespace(last=-1) %}\
{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
{%- for m in messages %}\
{%- if m['role'] == 'user' or (m['role'] == 'system' and not loop.first) %}\
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
{%- elif m['role'] == 'assistant' %}\
{%- set content = m['content'] or '' %}{%- set thought = '' %}\
{%- if m['reasoning_content'] is string %}{%- set thought = m['reasoning_content'] %}\
{%- elif '</think>' in content %}\
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}\
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}\
{%- if loop.index0 > ns.last and (loop.last or thought) %}\
{{ '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}\
{%- else %}{{ '<|im_start|>assistant\n' + content }}{%- endif %}\
{%- for call in m['tool_calls'] or [] %}\
{{ '\n<tool_call>\n{"name": "' + call['function']['name'] + '", "arguments": ' + call['function']['arguments'] | tojson + '}\n</tool_call>' }}\
{%- endfor %}{{ '<|im_end|>\n' }}\
{%- elif m['role'] == 'tool' %}\
{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}\
{%- endif %}"""

# What stands before </think> is dropped in every turn, the last one too.
R1 = """\
{{ bos_token }}{%- for m in messages %}{%- if m['role'] == 'system' %}{{ m['content'] }}{%- endif %}{%- endfor %}\
{%- for m in messages %}\
{%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}\
{%- elif m['role'] == 'assistant' %}\
{%- set content = m['content'] %}\
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}\
{{ '<|Assistant|>' + content + eos_token }}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{%- endif %}"""

NEMOTRON = """\
{{ bos_token }}{{ '<|ctl10|>System\n' }}\
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{%- endif %}{{ '\n' }}\
{%- for m in messages %}\
{%- if m['role'] == 'user' %}{{ '<|ctl11|>User\n' + m['content'] + '\n' }}\
{%- elif m['role'] == 'assistant' %}{{ '<|ctl11|>Assistant\n' + m['content'] + '\n<|ctl12|>\n' }}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|ctl11|>Assistant\n<think>\n' }}{%- endif %}"""

GPT_OSS = """\
{{ '<|start|>system<|message|>You are a model.<|end|>' }}\
{%- for m in messages %}\
{%- if m['role'] == 'system' %}{{ '<|start|>developer<|message|># Instructions\n\n' + m['content'] + '<|end|>' }}\
{%- elif m['role'] == 'user' %}{{ '<|start|>user<|message|>' + m['content'] + '<|end|>' }}\
{%- elif m['role'] == 'assistant' %}\
{%- if m['thinking'] and loop.last %}\
{{ '<|start|>assistant<|channel|>analysis<|message|>' + m['thinking'] + '<|end|>' }}{%- endif %}\
{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}\
{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""

# No token ends an answer: the next speaker's mark does.
GLM = """\
{{ '[gMASK]<sop>' }}\
{%- for m in messages %}\
{%- if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] }}\
{%- elif m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] }}\
{%- elif m['role'] == 'assistant' %}\
{%- set content = m['content'] %}\
{%- if '</think>' in content %}{{ '<|assistant|>\n' + content.strip() }}\
{%- else %}{{ '<|assistant|>\n<think></think>\n' + content.strip() }}{%- endif %}{%- endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|assistant|>' }}\
{%- if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{%- endif %}\
{%- endif %}"""

GRANITE = """\
{%- if messages[0]['role'] != 'system' %}\
{{ '<|start_of_role|>system<|end_of_role|>You are a helper.<|end_of_text|>\n' }}{%- endif %}\
{%- if documents %}{%- for d in documents %}\
{{ '<|start_of_role|>document<|end_of_role|>' + d['text'] + '<|end_of_text|>\n' }}{%- endfor %}{%- endif %}\
{%- for m in messages %}\
{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

COHERE = """\
{{ bos_token }}\
{%- for m in messages %}\
{%- set name = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'}[m['role']] %}\
{{ '<|START_OF_TURN_TOKEN|><|' + name + '_TOKEN|>' }}\
{%- if m['role'] == 'assistant' %}{{ '<|START_RESPONSE|>' + m['content'].strip() + '<|END_RESPONSE|>' }}\
{%- else %}{{ m['content'].strip() }}{%- endif %}{{ '<|END_OF_TURN_TOKEN|>' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{%- endif %}"""

FAMILIES = {
    "ChatML": Family(CHATML, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",)),
    "SmolLM2": Family(SMOLLM2, "<|im_start|>", "<|im_end|>"),
    "Llama 2": Family(LLAMA2, "<s>", "</s>", adds_bos=True),
    "Llama 3": Family(
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        adds_bos=True,
    ),
    "Mistral": Family(MISTRAL, "<s>", "</s>", ("[INST]", "[/INST]"), adds_bos=True),
    "Gemma": Family(
        GEMMA,
        "<bos>",
        "<eos>",
        ("<start_of_turn>", "<end_of_turn>"),
        adds_bos=True,
        takes_system=False,
    ),
    "Phi-3": Family(
        PHI3, "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    ),
    "Qwen3": Family(QWEN3, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",)),
    "R1": Family(
        R1,
        "<|begin▁of▁sentence|>",
        "<|end▁of▁sentence|>",
        ("<|User|>", "<|Assistant|>"),
        adds_bos=True,
        begins_thinking=True,
    ),
    "Nemotron": Family(
        NEMOTRON,
        "<s>",
        "<|ctl12|>",
        ("<|ctl10|>", "<|ctl11|>"),
        adds_bos=True,
        begins_thinking=True,
    ),
    "gpt-oss": Family(
        GPT_OSS,
        "<|startoftext|>",
        "<|return|>",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    ),
    "GLM": Family(
        GLM,
        "[gMASK]",
        "<|endoftext|>",
        ("<sop>", "<|user|>", "<|system|>", "<|assistant|>"),
    ),
    "Granite": Family(
        GRANITE,
        "<|end_of_text|>",
        "<|end_of_text|>",
        ("<|start_of_role|>", "<|end_of_role|>"),
    ),
    "Cohere": Family(
        COHERE,
        "<BOS_TOKEN>",
        "<|END_OF_TURN_TOKEN|>",
        (
            "<|START_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
        adds_bos=True,
    ),
}

TEXT = "the film was good. the answer is 4. why? what is it about, and who is in it?\n\n" * 9


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    "A byte-pair tokenizer with the family's special tokens and template."
    tokenizer = bpe_tokenizer(
        [TEXT],
        300,
        lowercase=False,
        pad="<|pad|>",
        bos=family.bos,
        eos=family.eos,
        add_bos=family.adds_bos,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    tokenizer.chat_template = family.template
    return tokenizer
