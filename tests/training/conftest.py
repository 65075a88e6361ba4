"What several files of this folder use: a tokenizer whose nine words are the vocabulary of `small_models.tiny`."
import pytest

from instruct_goose.models.text import word_tokenizer


@pytest.fixture
def tokenizer():
    return word_tokenizer("the a film plot is good bad".split(), model_max_length=12, pad="<end>", bos="<end>", eos="<end>")
