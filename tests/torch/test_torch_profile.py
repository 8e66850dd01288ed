"""The torch profiler's shares: operations land in their kinds, and the trace is one that a browser opens."""

import json

import pytest

torch = pytest.importorskip("torch")
profiling = pytest.importorskip("dualtune_torch.profile")

F = torch.nn.functional
X = torch.ones(4, 8, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda: X @ X, "matrix products"),
        (lambda: torch.zeros(8, 8).addmm_(X[0].detach(), X[1].detach()), "matrix products"),
        (lambda: torch.zeros(4, 8, 8).baddbmm_(X.detach(), X.detach()), "matrix products"),
        (lambda: F.linear(X, X[0], X[0, 0]).sum().backward(), "matrix products"),
        (lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]), "attention kernels"),
        (lambda: F.cross_entropy(X[0], torch.zeros(8, dtype=torch.long)).backward(), "softmax and loss"),
        (lambda: X.to(torch.bfloat16), "copies and casts"),
        (lambda: torch.cat([X, X]), "copies and casts"),
        (lambda: (F.silu(X) * X.rsqrt()).sum().backward(), "elementwise and reductions"),
        (lambda: torch.arange(8).bitwise_xor_(torch.arange(8)) >> 2, "elementwise and reductions"),
        (lambda: X.view(-1).detach(), profiling.OTHER),
    ],
)
def test_operations_land_in_their_kind(work, kind, tmp_path):
    found = profiling.profile(work, tmp_path / "trace.json", torch.device("cpu"))
    assert kind in found.seconds
    assert found.seconds.keys() <= {*profiling.KINDS, profiling.OTHER}
    others = {"matrix products", "attention kernels", "softmax and loss", "dequantization"} - {kind}
    assert not others & found.seconds.keys()


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention kernels"),
        ("void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>", "dequantization"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("Memcpy HtoD (Pageable -> Device)", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor>", "elementwise and reductions"),
        ("triton_poi_fused__to_copy_mul_silu_0", "elementwise and reductions"),
    ],
)
def test_kernels_of_a_gpu_land_in_their_kind(kernel, kind):
    """Names as torch's profiler shows them."""
    assert profiling.kind_of(kernel) == kind


def test_the_trace_is_in_chrome_s_format(tmp_path):
    found = profiling.profile(lambda: X @ X, tmp_path / "trace.json", torch.device("cpu"))
    events = json.loads(found.trace.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::bmm" and event["ph"] == "X" for event in events)


def test_the_bytes_that_are_held_are_counted_once_and_the_most_of_a_step_on_top(tmp_path):
    before = profiling.bytes_held()
    held = torch.ones(1000, 1000, requires_grad=True)
    views = [held[:500], held.detach().view(-1)]
    assert profiling.bytes_held() - before == held.nbytes
    held.sum().backward()
    assert profiling.bytes_held() - before == 2 * held.nbytes and len(views) == 2
    found = profiling.profile(lambda: (torch.zeros(3000, 1000), None)[1], tmp_path / "t.json", torch.device("cpu"))
    assert found.peak_bytes - before == 5 * held.nbytes
