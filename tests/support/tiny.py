"""Tokenizers of single letters for tiny models, one for each kind of wrapping."""

import transformers as tf
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = [*"abcdefghijklmnopqrstuvwxyz.,"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]


def _numbered(tokens):
    return {token: number for number, token in enumerate(tokens)}


def _scored(special):
    return [*((token, 0.0) for token in special), *((letter, -3.0) for letter in ["▁", *LETTERS])]


def tokenizer(name):
    """Build a tokenizer: bert and albert [CLS] … [SEP], roberta <s> … </s>, t5 … </s>, llama <s> …, gpt2 plain."""
    if name == "bert":
        return tf.BertTokenizer(vocab=_numbered(PIECES))
    if name == "albert":
        return tf.AlbertTokenizer(vocab=_scored(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]))
    if name == "t5":
        return tf.T5Tokenizer(vocab=_scored(["<pad>", "</s>", "<unk>"]), extra_ids=0)
    if name == "llama":
        vocabulary = _numbered(["<unk>", "<s>", "</s>", "▁", *LETTERS])
        return tf.LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True)
    letters = sorted(ByteLevel.alphabet())
    if name == "roberta":
        return tf.RobertaTokenizer(vocab=_numbered(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters]), merges=[])
    return tf.GPT2Tokenizer(vocab=_numbered(["<|endoftext|>", *letters]), merges=[])


def gpt2(**changes):
    """Build a GPT-2 of two layers with the vocabulary of its tokenizer."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 257}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes | {"bos_token_id": 0, "eos_token_id": 0} | changes)).eval()
