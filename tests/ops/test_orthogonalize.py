import pytest
import torch

from nasfast.ops import reference


def test_mixed_shapes_are_orthonormal_and_keep_span():
    shapes = [(7, 7), (12, 5), (5, 12), (1, 1), (1, 4), (64, 48)]
    matrices = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    for z, q in zip(matrices, reference.orthogonalize(matrices), strict=True):
        assert q.shape == z.shape and q.is_contiguous()
        tall_q, tall_z = (q, z) if z.shape[0] >= z.shape[1] else (q.mT, z.mT)
        eye = torch.eye(tall_q.shape[1], dtype=torch.float64)
        assert (tall_q.mT @ tall_q - eye).abs().max() <= 1e-12
        # R = Q^T Z is upper triangular with a positive diagonal, which makes Q unique
        r = tall_q.mT @ tall_z
        assert r.tril(-1).abs().max() <= 1e-12 * tall_z.norm()
        assert (r.diagonal() > 0).all()


def test_a_batch_equals_its_matrices():
    batch = torch.randn(3, 2, 5, 4)
    (together,) = reference.orthogonalize([batch])
    apart = reference.orthogonalize(list(batch.flatten(0, 1)))
    torch.testing.assert_close(together.flatten(0, 1), torch.stack(apart), rtol=0, atol=1e-6)


def test_types_empty_and_single():
    (q,) = reference.orthogonalize([torch.randn(20, 10)])
    assert q.dtype == torch.float32
    assert (q.double().mT @ q.double() - torch.eye(10)).abs().max() <= 2e-7
    single = reference.orthogonalize([torch.tensor([[-3.0]]), torch.tensor([[2.0]]), torch.tensor([[0.0]])])
    assert [m.item() for m in single] == [-1, 1, 1]
    assert [tuple(m.shape) for m in reference.orthogonalize([torch.ones(0, 3), torch.ones(4, 0)])] == [(0, 3), (4, 0)]
    assert reference.orthogonalize([]) == []


def test_law_is_haar():
    count, n = 20_000, 4
    (qs,) = reference.orthogonalize([torch.randn(count, n, n, dtype=torch.float64)])
    first = qs[:, 0, 0]
    trace = qs.diagonal(dim1=1, dim2=2).sum(1)
    expected = [
        (first, 0.0),
        (first**2, 1 / n),
        (first**4, 3 / (n * (n + 2))),
        (trace, 0.0),
        (trace**2, 1.0),
        ((torch.linalg.det(qs) > 0).double(), 0.5),
    ]
    for sample, mean in expected:
        assert abs(sample.mean() - mean) <= 4 * sample.std() / count**0.5
    # without the sign fix the first entry is never positive: the test above can fail
    raw = torch.linalg.qr(torch.randn(1000, n, n, dtype=torch.float64))[0][:, 0, 0]
    assert abs(raw.mean()) > 4 * raw.std() / 1000**0.5


def test_wrong_dimension_is_named():
    with pytest.raises(ValueError, match=r"matrices\[1\] must be \(..., rows, columns\), got shape \(2,\)"):
        reference.orthogonalize([torch.ones(2, 2), torch.ones(2)])
