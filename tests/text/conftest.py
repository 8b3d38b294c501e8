"""The demo model's tokenizer and template, and transformers' view of the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from xylite.checkpoint import Checkpoint, open_checkpoint
from xylite.text.template import ChatTemplate
from xylite.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "text"


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of test data, one JSON object a line."""
    return [json.loads(line) for line in (DATA / name).read_text("utf-8").splitlines()]


def conversations() -> dict[str, dict[str, Any]]:
    return json.loads((DATA / "chat_template_cases.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    return open_checkpoint("demo", with_weights=False)


@pytest.fixture(scope="session")
def smollm(demo: Checkpoint) -> Tokenizer:
    return Tokenizer.from_checkpoint(demo)


@pytest.fixture(scope="session")
def smollm_template(demo: Checkpoint, smollm: Tokenizer) -> ChatTemplate:
    assert demo.chat_template is not None
    return ChatTemplate(demo.chat_template, smollm.special_tokens)


@pytest.fixture(scope="session")
def demo_dir(demo: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo tokenizer as a Hugging Face directory, built by other means than xylite's."""
    metadata = demo.gguf_metadata
    assert metadata is not None and demo.chat_template is not None
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    inner = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    control = [
        t for t, y in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if y == 3
    ]
    inner.add_special_tokens([AddedToken(t, normalized=False) for t in control])
    path = tmp_path_factory.mktemp("demo")
    inner.save(str(path / "tokenizer.json"))
    named = {"bos_token": tokens[1], "eos_token": tokens[2], "pad_token": tokens[2]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": tokens[0], **named}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (path / "chat_template.jinja").write_text(demo.chat_template)
    return path


@pytest.fixture(scope="session")
def reference(demo_dir: Path) -> Any:
    """transformers' tokenizer of the demo model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(demo_dir))
