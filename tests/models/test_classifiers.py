"Classifiers of three shapes, tiny and untrained: the oracle is the model's own forward on one unpadded text, and the softmax."
import pytest
import torch
import transformers

from instruct_goose.models.reward_model import Classifier
from instruct_goose.models.tokens import word_tokenizer
from instruct_goose.training.config import RLHFConfig
from instruct_goose.training.rewards import score_texts
from instruct_goose.training.trainer import RLHFTrainer

WORDS = "the a film plot is good bad very".split()
TOKENIZER = word_tokenizer(WORDS, 12, pad="<end>", bos="<end>", eos="<end>")
ENDED = word_tokenizer(WORDS, 12, pad="<end>", bos="<end>", eos="<end>", add_eos=True)  # texts end in what is padding
TEXTS = ["the film", "a very very bad plot", "film", "the plot is good", "bad bad", "a film"]
V = len(TOKENIZER)


def model(kind, labels):
    torch.manual_seed(3)
    shape = dict(vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=12, num_labels=labels)
    made = {"bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**shape)),
            "llama": lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**shape, num_key_value_heads=1)),
            "gpt2": lambda: transformers.GPT2ForSequenceClassification(transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=12, num_labels=labels))}[kind]()
    for p in made.parameters(): torch.nn.init.normal_(p, std=.3)
    return made.train()  # dropout is on until it is asked


def slow(judge, tokenizer, label):
    judge.eval()
    scores = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            head = getattr(judge, "score", None)
            z = judge(input_ids=ids).logits[0] if head is None else head(judge.base_model(input_ids=ids)[0])[0, -1]
        p = z.double().softmax(-1)
        scores.append(z[0].item() if len(z) == 1 else (p[label] / (1 - p[label])).log().item())
    judge.train()
    return scores


@pytest.mark.parametrize("tokenizer", [TOKENIZER, ENDED], ids=["open", "ended"])
@pytest.mark.parametrize("kind, labels, label", [("bert", 1, None), ("bert", 3, "LABEL_2"), ("gpt2", 1, None), ("gpt2", 2, 0), ("llama", 3, 1)])
def test_each_text_as_if_alone(kind, labels, label, tokenizer):
    judge = model(kind, labels)
    where = {None: 0, "LABEL_2": 2}.get(label, label)
    for batch_size in (1, 64):
        assert Classifier(judge, tokenizer, label, batch_size=batch_size).score(TEXTS) == pytest.approx(slow(judge, tokenizer, where), abs=1e-4)
    assert judge.training and all(p.grad is None for p in judge.parameters())


def test_a_policy_is_trained_on_one_and_the_prompt_reaches_its_template():
    seen = []
    def template(prompt, completion): seen.append((prompt, completion)); return f"{prompt} is {completion}".strip()
    torch.manual_seed(0)
    policy = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0))
    trainer = RLHFTrainer(policy, config=RLHFConfig(device="cpu", batch_size=4, max_new_tokens=3, minibatches=1, steps=1), tokenizer=TOKENIZER)
    judge = Classifier(model("bert", 2), ENDED, 1, template)
    history = trainer.train(["the film", "a plot"], [judge, lambda completions: [0.] * len(completions)], progress=False)
    assert "reward_mean/Classifier" in history[0] and len(seen) == 4 and {p for p, _ in seen} == {"the film", "a plot"}


def test_pipelines_and_what_is_no_judge(unchecked):
    one, two = (transformers.pipeline("text-classification", model=model("bert", n).eval(), tokenizer=TOKENIZER) for n in (1, 2))
    assert score_texts(one, TEXTS).tolist() == pytest.approx(slow(one.model, TOKENIZER, 0), abs=1e-4)
    with pytest.raises(ValueError, match="2 labels, 'LABEL_0', 'LABEL_1': say which is wanted"): score_texts(two, TEXTS)
    with unchecked():
        for kind in ("bert", "gpt2"):
            with pytest.raises(TypeError, match=r"reads token ids: give it with its tokenizer, Classifier\(model, tokenizer"): score_texts(model(kind, 1), TEXTS)
        for wrong, error, says in ((lambda: Classifier(model("bert", 1)), TypeError, "tokenizer is a NoneType"), (lambda: Classifier(model("bert", 1).bert, TOKENIZER), TypeError, "BertModel is no sequence classifier"),
                                   (lambda: Classifier(model("bert", 2), TOKENIZER, "GOOD"), ValueError, "label is 'GOOD', and the classifier has 'LABEL_0', 'LABEL_1'"),
                                   (lambda: Classifier(model("bert", 1), TOKENIZER).score(["good", "very " * 20]), ValueError, "text 1 of the classifier has 21 tokens, the limit is 12"),
                                   (lambda: Classifier(model("bert", 1), TOKENIZER, template="chat"), ValueError, "no chat_template")):
            with pytest.raises(error, match=says): wrong()
