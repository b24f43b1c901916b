"""The KL estimators: as formulas, as estimates of the KL, and what their gradients are in the mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areno.loss_fns.kl import kl_array, kl_per_token

FORMULAS = {
    "k1": lambda lp, ref: lp - ref,
    "k2": lambda lp, ref: (lp - ref) ** 2 / 2,
    "k3": lambda lp, ref: math.exp(ref - lp) - 1 - (ref - lp),
}


@pytest.mark.parametrize("estimator", FORMULAS)
def test_tensor_and_array_are_the_formula(estimator):
    lps, refs = [-0.1, -2.0, -1.0, -0.5], [-0.3, -0.2, -1.0, -6.0]
    expected = [FORMULAS[estimator](lp, ref) for lp, ref in zip(lps, refs, strict=True)]
    np.testing.assert_allclose(kl_array(lps, refs, estimator), expected, rtol=1e-12, atol=1e-15)
    tensor = kl_per_token(torch.tensor(lps, dtype=torch.float64), torch.tensor(refs, dtype=torch.float64), estimator)
    np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", FORMULAS)
@pytest.mark.parametrize("gap", [100.0, -100.0, math.inf, -math.inf])
def test_far_apart_it_is_bounded_and_without_gradient(estimator, gap):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = kl_per_token(logprobs, logprobs.detach() - gap, estimator)
    kl.backward()
    assert kl.item() == pytest.approx(FORMULAS[estimator](math.copysign(20.0, gap), 0.0), rel=1e-5)
    assert logprobs.grad.item() == 0
    assert kl_array([-1.0], [-1.0 - gap], estimator).item() == pytest.approx(kl.item(), rel=1e-5)


def exact(estimator):
    """(mean of the estimator, mean of its gradient, KL(policy || ref) and its gradient, gradient of KL(ref || policy)).

    Means over a policy with five tokens, exactly, by its probabilities; gradients with respect to its logits.
    """
    generator = torch.Generator().manual_seed(0)
    logits, ref = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    logprobs, ref_logprobs = logits.log_softmax(0), ref.log_softmax(0)
    p = logprobs.exp()
    mean = p.detach() @ kl_per_token(logprobs, ref_logprobs, estimator)  # tokens are drawn, then differentiated
    forward, backward = p @ (logprobs - ref_logprobs), ref_logprobs.exp() @ (ref_logprobs - logprobs)
    grads = [torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (mean, forward, backward)]
    return mean.item(), grads[0], forward.item(), grads[1], grads[2]


def test_what_the_documentation_says_about_bias():
    mean, grad, kl, _, _ = exact("k1")
    assert mean == pytest.approx(kl)
    torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-12, rtol=0)  # no pull to the reference at all

    mean, grad, kl, kl_grad, _ = exact("k2")
    assert mean != pytest.approx(kl, rel=0.01)
    torch.testing.assert_close(grad, kl_grad)

    mean, grad, kl, kl_grad, other_grad = exact("k3")
    assert mean == pytest.approx(kl)
    torch.testing.assert_close(grad, other_grad)
    assert not torch.allclose(grad, kl_grad, rtol=0.05)


def test_unknown_estimators_are_named():
    with pytest.raises(ValueError, match="kl_estimator is 'k4'; expected k1, k2 or k3"):
        kl_array([0.0], [0.0], "k4")  # type: ignore[arg-type]
