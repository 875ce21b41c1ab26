"""Features and logits of models with several inputs, and of Hugging Face's classifiers."""

from __future__ import annotations

import copy

import pytest
import torch
from token_models import CLASSES, Masked, MaskedByZeros, small_bert, texts
from torch import Tensor, nn

from flwr_kd.inputs import NamedInputs
from flwr_kd.models import FeatureModel, SplitModel, as_feature_model


def batch() -> NamedInputs:
    return texts(5, 0).tensors[0]


class Extractor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole = Masked()
        self.whole.classifier = nn.Identity()  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.whole(input_ids, attention_mask)


def test_features_are_the_inputs_of_the_last_linear() -> None:
    plain, x = Masked(), batch()
    model = as_feature_model(plain)
    expected = Extractor()
    expected.whole.load_state_dict({k: v for k, v in plain.state_dict().items() if "classifier" not in k})
    assert torch.equal(model.features(x), expected(x["input_ids"], x["attention_mask"]))  # type: ignore[operator]
    assert torch.equal(model(x), plain(x["input_ids"], x["attention_mask"]))
    assert torch.equal(model(**x), model(x))


@pytest.mark.parametrize("kind", [FeatureModel, SplitModel])
def test_pairs_hand_the_inputs_to_the_extractor(kind: type[FeatureModel] | type[SplitModel]) -> None:
    x, head = batch(), nn.Linear(8, CLASSES)
    extractor = Extractor()
    model = kind(extractor, head)
    expected = extractor(x["input_ids"], x["attention_mask"])
    assert torch.equal(model.features(x), expected)
    assert torch.equal(model(x), head(expected))
    assert torch.equal(as_feature_model(model)(x), head(expected))


@pytest.mark.long
class TestHuggingFace:
    def test_features_are_the_representation_before_the_last_linear(self) -> None:
        bert, x = small_bert().eval(), batch()
        model = as_feature_model(copy.deepcopy(bert))
        assert (model.feature_dim, model.num_classes) == (8, CLASSES)
        pooled = bert.bert(**x).pooler_output  # type: ignore[operator]
        assert torch.equal(model.features(x), pooled)  # type: ignore[operator]
        assert torch.equal(model.classify(pooled), model(x))  # type: ignore[operator]

    def test_logits_are_unwrapped(self) -> None:
        bert, x = small_bert().eval(), batch()
        model = as_feature_model(bert)
        assert torch.equal(model(x), bert(**x).logits)
        assert torch.equal(model(x["input_ids"]), bert(x["input_ids"]).logits)

    def test_names_of_the_state_are_the_models_own(self) -> None:
        bert = small_bert()
        assert list(as_feature_model(bert).state_dict()) == list(bert.state_dict())

    def test_an_output_that_is_no_linears_is_refused(self) -> None:
        """GPT-2 classifies each token, and picks one: features before its ``Linear`` are not one per text."""
        from transformers import GPT2Config, GPT2ForSequenceClassification

        config = GPT2Config(
            vocab_size=30, n_positions=6, n_embd=8, n_layer=1, n_head=2, num_labels=CLASSES, pad_token_id=0
        )
        model = as_feature_model(GPT2ForSequenceClassification(config).eval())
        with pytest.raises(ValueError, match="its output is not that of its Linear 'score'"):
            model.features(batch())  # type: ignore[operator]

    def test_an_output_object_is_traced(self) -> None:
        class Output:
            def __init__(self, logits: Tensor) -> None:
                self.logits = logits

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
                self.unused = nn.Linear(1, 1)

            def forward(self, x: Tensor) -> Output:
                return Output(self.last(torch.relu(self.first(x))))

        net, x = Wrapped(), torch.ones(2, 4)
        model = as_feature_model(net)
        assert model.feature_dim == 3
        assert torch.equal(model(x), net(x).logits)


def test_a_model_of_one_input_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match="does not take the inputs input_ids, attention_mask by name"):
        as_feature_model(MaskedByZeros())(batch())
