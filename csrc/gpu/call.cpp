#include "call.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <limits>

#include "../cpu/launch.h"
#include "../cpu/plan.h"
#include "dense_forward.h"

namespace nasfast::gpu {
namespace {

using cpu::ChainPlan;
using cpu::kConvOp;
using cpu::StagePlan;
using torch::headeronly::ScalarType;

static_assert(static_cast<int>(Act::kRelu6) == static_cast<int>(cpu::Act::kRelu6), "plans have one order");

// Whether the kernel of dense_forward.h runs this stage.
bool is_stem(const ChainPlan& plan, size_t i) {
  const StagePlan& s = plan.stages[i];
  return i == 0 && s.kind == cpu::Kind::kDense && s.kernel == 3 && s.stride <= 2 && s.in_channels <= kDenseInput &&
         s.width * s.in_channels % 8 == 0;
}

// Refuses what the kernels cannot do. nasfast/ops/chain/limits.py says the same before, with explanations for the user.
ChainPlan read_plan(const std::vector<int64_t>& numbers) {
  ChainPlan plan(numbers);
  STD_TORCH_CHECK(!plan.shuffle, kConvOp, ": the CUDA kernels do not shuffle");
  const int64_t most = std::numeric_limits<int>::max() / 2;
  STD_TORCH_CHECK(plan.batch <= most && plan.height <= most && plan.width <= most, kConvOp,
                  ": x is too large for the CUDA kernels");
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const StagePlan& s = plan.stages[i];
    const bool dense = s.kind == cpu::Kind::kDense;
    STD_TORCH_CHECK((dense ? is_stem(plan, i) : s.in_channels % 8 == 0) && s.act <= cpu::Act::kRelu6 &&
                        s.out_channels % 8 == 0 && s.in_channels <= most && s.out_channels <= most,
                    kConvOp, ", stage ", i,
                    " of the plan: the CUDA kernels need a pointwise or depthwise convolution, or the dense 3 x 3 one "
                    "of a stem with at most ",
                    kDenseInput,
                    " channels and rows in multiples of 8 numbers; other channels in multiples of 8; and identity, "
                    "relu or relu6; got kind ",
                    static_cast<int64_t>(s.kind), ", ", s.in_channels, " -> ", s.out_channels,
                    " channels and activation ", static_cast<int64_t>(s.act));
  }
  STD_TORCH_CHECK(!plan.recompute(), kConvOp, ": the CUDA kernels compute no output again");
  return plan;
}

Geometry geometry_of(const ChainPlan& plan, const StagePlan& s) {
  const auto narrow = [](int64_t number) { return static_cast<int>(number); };
  return {narrow(plan.batch),    narrow(s.height),       narrow(s.width),  narrow(s.out_height), narrow(s.out_width),
          narrow(s.in_channels), narrow(s.out_channels), narrow(s.kernel), narrow(s.stride)};
}

// Numbers of all stages behind mean and variance, which are 2 doubles per channel: the folds, and then the intervals.
struct Coefficients {
  Fold* fold;
  Interval* interval;

  Coefficients(const Tensor& statistics, const ChainPlan& plan, const StagePlan& stage) {
    char* behind = static_cast<char*>(statistics.mutable_data_ptr()) + plan.statistics_size * sizeof(double);
    const int64_t before = stage.statistics_at / 2, all = plan.statistics_size / 2;
    fold = reinterpret_cast<Fold*>(behind) + before;
    interval = reinterpret_cast<Interval*>(behind + all * sizeof(Fold)) + before;
  }
};

double* statistics_of(const Tensor& statistics, const StagePlan& stage) {
  return static_cast<double*>(statistics.mutable_data_ptr()) + stage.statistics_at;
}

uint16_t* bits(const Tensor& tensor) { return static_cast<uint16_t*>(tensor.mutable_data_ptr()); }

// The output of a stage.
uint16_t* output_of(const Tensor& saved, const StagePlan& stage) { return bits(saved) + stage.saved_at; }

// The last BatchNorm of a chain where it is deferred to the chain that reads the result: the fields of DeferredNorm in
// nasfast/ops/chain/deferred.py, which says what they are.
struct DeferredNorm {
  uint16_t* y;
  Fold* fold;
  Interval* interval;
  double* statistics;
  float* weight;
  Back* back;
  float* gradients;

  NormGradient gradient(int64_t rows, int64_t channels) const {
    NormGradient g{};
    g.gamma = weight;
    g.statistics = statistics;
    g.back = back;
    g.dgamma = gradients;
    g.dbeta = gradients + channels;
    g.share = 1 / static_cast<double>(rows);
    return g;
  }
};

// The tensors of one call: all on the device of the first and in its type, or in float.
struct TensorChecks {
  const Tensor& first;

  explicit TensorChecks(const Tensor& first) : first(first) {
    STD_TORCH_CHECK(first.scalar_type() == ScalarType::BFloat16 || first.scalar_type() == ScalarType::Half, kConvOp,
                    ": the CUDA kernels need bfloat16 or float16");
  }

  void image(const char* name, const Tensor& tensor, int64_t n, int64_t c, int64_t h, int64_t w) const {
    STD_TORCH_CHECK(tensor.dim() == 4 && tensor.size(0) == n && tensor.size(1) == c && tensor.size(2) == h &&
                        tensor.size(3) == w && cpu::is_channels_last(tensor) &&
                        tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device(),
                    kConvOp, ": ", name, " must be channels_last, of the type and on the device of the input, and of ",
                    "shape (", n, ", ", c, ", ", h, ", ", w, ")");
    aligned(name, tensor);
  }
  void vector(const char* name, const Tensor& tensor, int64_t size, ScalarType type) const {
    STD_TORCH_CHECK(tensor.numel() == size && tensor.is_contiguous() && tensor.scalar_type() == type &&
                        tensor.device() == first.device(),
                    kConvOp, ": ", name, " must be contiguous and have ", size,
                    " elements of the right type on the device of the input, got ", tensor.numel());
  }
  Fold* fold(const Tensor& tensor, int64_t channels) const {
    vector("fold", tensor, 2 * channels, ScalarType::Float);
    return static_cast<Fold*>(tensor.mutable_data_ptr());
  }
  // n, c, h, w: shape of the result whose BatchNorm is deferred.
  DeferredNorm deferred_norm(const std::vector<Tensor>& fields, int64_t n, int64_t c, int64_t h, int64_t w) const {
    STD_TORCH_CHECK(fields.size() == 7, kConvOp, ": a deferred BatchNorm is 7 tensors, got ", fields.size());
    const Tensor &y = fields[0], &fold = fields[1], &interval = fields[2], &statistics = fields[3], &weight = fields[4],
                 &back = fields[5], &gradients = fields[6];
    image("y of a deferred BatchNorm", y, n, c, h, w);
    const auto numbers = [&](const char* name, const Tensor& tensor, int64_t each) {
      vector(name, tensor, each * c, ScalarType::Float);
      aligned(name, tensor);
      return tensor.mutable_data_ptr();
    };
    vector("statistics", statistics, 2 * c, ScalarType::Double);
    return {bits(y),
            this->fold(fold, c),
            static_cast<Interval*>(numbers("interval", interval, 4)),
            static_cast<double*>(statistics.mutable_data_ptr()),
            static_cast<float*>(numbers("weight", weight, 1)),
            static_cast<Back*>(numbers("back", back, 4)),
            static_cast<float*>(numbers("gradients", gradients, 2))};
  }
  // The kernels read 16 bytes at a time; only a slice of a larger tensor can begin in between.
  static void aligned(const char* name, const Tensor& tensor) {
    STD_TORCH_CHECK(tensor.numel() == 0 || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, kConvOp,
                    ": ", name, " must begin at a multiple of 16 bytes");
  }
};

// The tensors of a plan.
struct Checks : TensorChecks {
  const ChainPlan& plan;

  Checks(const Tensor& first, const ChainPlan& plan) : TensorChecks(first), plan(plan) {}

  void input(const char* name, const Tensor& tensor) const {
    image(name, tensor, plan.batch, plan.channels, plan.height, plan.width);
  }
  void result(const char* name, const Tensor& tensor) const {
    const StagePlan& last = plan.stages.back();
    image(name, tensor, plan.batch, last.out_channels, last.out_height, last.out_width);
  }
  // defers: whether the output of the last convolution, which is at the end, is in a deferred BatchNorm instead.
  void saved(const Tensor& tensor, bool defers) const {
    vector("saved", tensor, defers ? plan.stages.back().saved_at : plan.saved_size, first.scalar_type());
    aligned("saved", tensor);
  }
  // The last BatchNorm of this chain, if it is deferred; otherwise nulls.
  DeferredNorm own_norm(const std::vector<Tensor>& fields) const {
    if (fields.empty()) return {};
    const StagePlan& last = plan.stages.back();
    return deferred_norm(fields, plan.batch, last.out_channels, last.out_height, last.out_width);
  }
  // The BatchNorm in front of x, which the chain with the result x has deferred.
  DeferredNorm input_norm(const std::vector<Tensor>& fields) const {
    return deferred_norm(fields, plan.batch, plan.channels, plan.height, plan.width);
  }
  void gradients(const Tensor& grad, const std::optional<Tensor>& dx, bool add_input) const {
    result("grad", grad);
    if (dx) input("dx", *dx);
    if (dx && add_input) input("grad, to be added,", grad);
    STD_TORCH_CHECK(!dx || plan.stages[0].kind != cpu::Kind::kDense, kConvOp,
                    ": the CUDA kernels have no input gradient of a dense stage");
  }
  Weight weight(const StagePlan& stage, const Tensor& tensor) const {
    const int64_t inner = stage.kind == cpu::Kind::kDepthwise ? 1 : stage.in_channels;
    const bool is_float = tensor.scalar_type() == ScalarType::Float;
    vector("conv_weight", tensor, stage.out_channels * inner * stage.kernel * stage.kernel,
           is_float ? ScalarType::Float : first.scalar_type());
    aligned("conv_weight", tensor);
    return {tensor.const_data_ptr(), is_float};
  }
  // Lists have one entry per stage, and the statistics have room for the coefficients of BatchNorm.
  void lists(size_t conv_weights, size_t bn_weights, size_t bn_biases, size_t eps, const Tensor& statistics) const {
    const size_t count = plan.stages.size();
    STD_TORCH_CHECK(conv_weights == count && bn_weights == count && bn_biases == count && eps == count, kConvOp,
                    ": every stage of the plan needs one of each tensor and eps");
    const int64_t doubles = (2 * sizeof(double) + sizeof(Fold) + sizeof(Interval)) / sizeof(double);
    vector("statistics", statistics, plan.statistics_size / 2 * doubles, ScalarType::Double);
    aligned("statistics", statistics);
  }
};

ApplyArgs apply_args(const uint16_t* y, const Fold* fold, Act act, const uint16_t* added, uint16_t* out, int64_t rows,
                     int64_t channels) {
  const int narrow = static_cast<int>(channels);
  return {y, fold, added, out, rows, narrow, act, lanes_of(narrow)};
}

ReduceArgs reduce_args(const uint16_t* grad, const DeferredNorm& norm, int64_t rows, int64_t channels) {
  const int narrow = static_cast<int>(channels);
  return {grad, norm.y, norm.interval, rows, narrow, lanes_of(narrow), norm.gradient(rows, channels)};
}

// The BatchNorm of a stage, without what a launch knows.
Norm norm_of(const StagePlan& stage, const Tensor& statistics, const Coefficients& coefficients, const Tensor& weight,
             const Tensor& bias, double eps) {
  Norm norm{};
  norm.gamma = cpu::float_data(weight);
  norm.beta = cpu::float_data(bias);
  norm.statistics = statistics_of(statistics, stage);
  norm.fold = coefficients.fold;
  norm.interval = coefficients.interval;
  norm.eps = static_cast<float>(eps);
  norm.act = static_cast<Act>(stage.act);
  norm.share = 1 / static_cast<double>(stage.rows);
  return norm;
}

// The BatchNorms of all stages in backward.
struct NormsBackward {
  std::vector<NormGradient> gradients;
  std::vector<const Interval*> intervals;
  size_t stop;  // the first stage whose BatchNorm has a gradient that is wanted, or the number of stages

  // backs: memory for the coefficients of all of them.
  NormsBackward(const Checks& check, const Tensor& statistics, const std::vector<Tensor>& bn_weights,
                const std::vector<Tensor>& dweights, const std::vector<Tensor>& dbiases, const std::vector<double>& eps,
                Back* backs)
      : stop(check.plan.stages.size()) {
    for (size_t i = 0; i < check.plan.stages.size(); ++i) {
      const StagePlan& s = check.plan.stages[i];
      check.vector("bn_weight", bn_weights[i], s.out_channels, ScalarType::Float);
      const auto wanted = [&](const char* name, const Tensor& gradient) -> float* {
        if (gradient.numel() == 0) return nullptr;
        check.vector(name, gradient, s.out_channels, ScalarType::Float);
        stop = std::min(stop, i);
        return static_cast<float*>(gradient.mutable_data_ptr());
      };
      NormGradient g{};
      g.gamma = cpu::float_data(bn_weights[i]);
      g.statistics = statistics_of(statistics, s);
      g.back = backs + s.statistics_at / 2;
      g.dgamma = wanted("dgamma", dweights[i]);
      g.dbeta = wanted("dbeta", dbiases[i]);
      g.eps = static_cast<float>(eps[i]);
      g.share = 1 / static_cast<double>(s.rows);
      gradients.push_back(g);
      intervals.push_back(Coefficients(statistics, check.plan, s).interval);
    }
  }
};

// Two buffers of 16-bit numbers, used in turn: a stage reads what the stage before it wrote.
struct DoubleBuffer {
  Tensor buffers[2];

  // elements(stage, i): numbers that stage i writes.
  template <class Elements>
  DoubleBuffer(const Tensor& like, const ChainPlan& plan, const Elements& elements, std::vector<Tensor>* memory) {
    int64_t most[2] = {0, 0};
    for (size_t i = 0; i < plan.stages.size(); ++i) most[i % 2] = std::max(most[i % 2], elements(plan.stages[i], i));
    for (int i = 0; i < 2; ++i) {
      buffers[i] = torch::stable::new_empty(like, {most[i]});
      memory->push_back(buffers[i]);
    }
  }
  uint16_t* written_by(size_t i_stage) const { return bits(buffers[i_stage % 2]); }
};

}  // namespace

Shapes::Shapes(const std::vector<int64_t>& numbers) {
  const ChainPlan plan = read_plan(numbers);
  for (const StagePlan& stage : plan.stages) stages.push_back(geometry_of(plan, stage));
}

ApplyArgs apply_args(const Tensor& x, const std::vector<Tensor>& deferred_input) {
  const size_t count = deferred_input.size();
  STD_TORCH_CHECK(x.dim() == 4 && x.numel() > 0 && x.size(1) % 8 == 0 && (count == 2 || count == 3), kConvOp,
                  ": x of channels in multiples of 8 is made from y, its fold and perhaps a tensor to add, got ", count,
                  " tensors");
  const Tensor &y = deferred_input[0], &fold = deferred_input[1];
  const int64_t channels = x.size(1);
  const TensorChecks check(x);
  const auto image = [&](const char* name, const Tensor& tensor) {
    check.image(name, tensor, x.size(0), channels, x.size(2), x.size(3));
    return bits(tensor);
  };
  const uint16_t* const added = count == 3 ? image("what is added", deferred_input[2]) : nullptr;
  return apply_args(image("y", y), check.fold(fold, channels), Act::kIdentity, added, image("x", x),
                    x.numel() / channels, channels);
}

ReduceArgs reduce_args(const Tensor& grad, const std::vector<Tensor>& deferred_norm) {
  STD_TORCH_CHECK(grad.dim() == 4 && grad.numel() > 0 && grad.size(1) % 8 == 0, kConvOp,
                  ": a backward begins with a gradient of channels in multiples of 8");
  const int64_t channels = grad.size(1), rows = grad.numel() / channels;
  const TensorChecks check(grad);
  check.image("grad", grad, grad.size(0), channels, grad.size(2), grad.size(3));
  const DeferredNorm norm = check.deferred_norm(deferred_norm, grad.size(0), channels, grad.size(2), grad.size(3));
  return reduce_args(bits(grad), norm, rows, channels);
}

ForwardCall::ForwardCall(const Tensor& x, const std::vector<Tensor>& conv_weights,
                         const std::vector<Tensor>& bn_weights, const std::vector<Tensor>& bn_biases,
                         const std::optional<Tensor>& added, const Tensor& y, const Tensor& saved,
                         const Tensor& statistics, const std::vector<Tensor>& deferred_input,
                         const std::vector<Tensor>& deferred_norm, const std::vector<int64_t>& numbers,
                         const std::vector<double>& eps)
    : bfloat16(x.scalar_type() == ScalarType::BFloat16), input{} {
  const ChainPlan plan = read_plan(numbers);
  const Checks check(x, plan);
  check.lists(conv_weights.size(), bn_weights.size(), bn_biases.size(), eps.size(), statistics);
  check.input("x", x);
  check.result("y", y);
  if (added) check.result("what is added", *added);
  const StagePlan& last = plan.stages.back();
  const bool defers = !deferred_norm.empty();
  STD_TORCH_CHECK(!defers || (!added && last.act == cpu::Act::kIdentity), kConvOp,
                  ": a chain defers a BatchNorm without an activation behind it and with nothing to add");
  const DeferredNorm own = check.own_norm(deferred_norm);
  const bool keep = saved.numel() > 0;
  if (keep) check.saved(saved, defers);
  if (!deferred_input.empty()) input = apply_args(x, deferred_input);
  // where they are not kept, outputs are only there until the next stage has read them
  const auto output = [&](const StagePlan& s, size_t) { return keep ? 0 : s.rows * s.out_channels; };
  const DoubleBuffer outputs(x, plan, output, &memory);

  const uint16_t* stage_input = bits(x);
  const Fold* fold = nullptr;
  Act act = Act::kIdentity;
  for (size_t i = 0; i < plan.stages.size(); ++i) {
    const StagePlan& s = plan.stages[i];
    const Coefficients coefficients(statistics, plan, s);
    check.vector("bn_weight", bn_weights[i], s.out_channels, ScalarType::Float);
    check.vector("bn_bias", bn_biases[i], s.out_channels, ScalarType::Float);
    ForwardStage stage{};
    stage.geometry = geometry_of(plan, s);
    stage.x = stage_input;
    stage.fold = fold;
    stage.act = act;
    stage.weight = check.weight(s, conv_weights[i]);
    const bool deferred = defers && i + 1 == plan.stages.size();
    stage.y = deferred ? own.y : keep ? output_of(saved, s) : outputs.written_by(i);
    stage.norm = norm_of(s, statistics, coefficients, bn_weights[i], bn_biases[i], eps[i]);
    if (deferred) {
      stage.norm.fold = own.fold;
      stage.norm.interval = own.interval;
      stage.norm.deferred_statistics = own.statistics;
      stage.norm.deferred_gamma = own.weight;
    }
    stage_input = stage.y;
    fold = coefficients.fold;
    act = stage.norm.act;
    stages.push_back(stage);
  }
  result = apply_args(defers ? nullptr : stage_input, fold, act, added ? bits(*added) : nullptr, bits(y), last.rows,
                      last.out_channels);
}

BackwardCall::BackwardCall(const Tensor& grad, const Tensor& saved, const Tensor& statistics,
                           const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights,
                           bool add_input, const std::optional<Tensor>& dx, const std::vector<Tensor>& dweights,
                           const std::vector<Tensor>& dbiases, const std::vector<Tensor>& input_norm,
                           const std::vector<Tensor>& deferred_norm, const std::vector<int64_t>& numbers,
                           const std::vector<double>& eps)
    : bfloat16(grad.scalar_type() == ScalarType::BFloat16), result_sums{}, input_sums{} {
  const ChainPlan plan = read_plan(numbers);
  const Checks check(grad, plan);
  check.lists(conv_weights.size(), bn_weights.size(), dweights.size(), eps.size(), statistics);
  STD_TORCH_CHECK(dbiases.size() == dweights.size(), kConvOp, ": every stage needs a dbias, empty if not wanted");
  check.gradients(grad, dx, add_input);
  const bool defers = !deferred_norm.empty();
  check.saved(saved, defers);
  const size_t count = plan.stages.size();
  const Tensor backs =
      torch::stable::new_empty(grad, {plan.statistics_size / 2 * int64_t{sizeof(Back)}}, ScalarType::Byte);
  memory.push_back(backs);
  NormsBackward norms(check, statistics, bn_weights, dweights, dbiases, eps,
                      static_cast<Back*>(backs.mutable_data_ptr()));
  const StagePlan& last = plan.stages.back();
  const int channels = static_cast<int>(last.out_channels);
  const DeferredNorm own = check.own_norm(deferred_norm);
  if (defers) norms.intervals.back() = own.interval;
  const uint16_t* const y = defers ? own.y : output_of(saved, last);
  // the kernel of a stage computes dz of the stage before it
  const size_t first = dx ? 0 : std::min(norms.stop, count - 1) + 1;
  PrecomputedGradients precomputed{};
  // whether there is a kernel that takes the gradients that the chain that reads the result has computed
  if (defers && first < count && last.kind == cpu::Kind::kPointwise) {
    precomputed = {own.gradients, norms.gradients.back().dgamma, norms.gradients.back().dbeta};
    norms.gradients.back().back = own.back;
  } else {
    result_sums = {
        bits(grad), y, norms.intervals.back(), last.rows, channels, lanes_of(channels), norms.gradients.back()};
  }
  // Whether stage i writes dz of the stage before: where that is the first one with a kernel, only its sums are wanted.
  // A depthwise kernel can leave the rest away; in the others each write would take longer.
  const auto is_read = [&](const StagePlan& s, size_t i) {
    return i > first || (i == first && s.kind != cpu::Kind::kDepthwise);
  };
  const auto size = [&](const StagePlan& s, size_t i) {
    return i > 0 && is_read(s, i) ? plan.batch * s.height * s.width * s.in_channels : 0;
  };
  const DoubleBuffer gradients(grad, plan, size, &memory);
  const uint16_t* dz = bits(grad);
  for (size_t i = count; i-- > first;) {
    const StagePlan& s = plan.stages[i];
    BackwardStage stage{};
    stage.geometry = geometry_of(plan, s);
    stage.grad = dz;
    stage.mask = i + 1 == count && s.act != cpu::Act::kIdentity ? norms.intervals[i] : nullptr;
    stage.y = i + 1 == count ? y : output_of(saved, s);
    if (i + 1 == count) stage.precomputed = precomputed;
    stage.back = norms.gradients[i].back;
    stage.weight = check.weight(s, conv_weights[i]);
    stage.dx = i == 0 ? bits(*dx) : is_read(s, i) ? gradients.written_by(i) : nullptr;
    if (i > 0) {
      stage.previous_y = output_of(saved, plan.stages[i - 1]);
      stage.interval = norms.intervals[i - 1];
      stage.gradient = norms.gradients[i - 1];
    } else if (add_input) {
      stage.added = bits(grad);
    }
    if (i == 0 && !input_norm.empty()) {
      const DeferredNorm previous = check.input_norm(input_norm);
      const int64_t rows = stage.geometry.in_rows();
      if (s.kernel > 1 && add_input) {  // the registers of a depthwise kernel have no room for rows of two tensors
        input_sums = reduce_args(stage.dx, previous, rows, s.in_channels);
      } else {
        stage.previous_y = previous.y;
        stage.interval = previous.interval;
        stage.gradient = previous.gradient(rows, s.in_channels);
      }
    }
    dz = stage.dx;
    stages.push_back(stage);
  }
}

Workspace::Workspace(const Tensor& like, int64_t pairs, const Tensor& zeros, int64_t needed)
    : partial(torch::stable::new_empty(like, {pairs * int64_t{sizeof(Vec2)}}, ScalarType::Byte)),
      counters(static_cast<int*>(zeros.mutable_data_ptr())) {
  STD_TORCH_CHECK(zeros.scalar_type() == ScalarType::Int && zeros.is_contiguous() && zeros.numel() >= needed &&
                      zeros.device() == like.device(),
                  kConvOp, ": needs ", needed, " counters, int32 zeros on the device of the input, got ",
                  zeros.numel());
}

Reduction Workspace::reduction(const Grid& grid, int channels) const {
  STD_TORCH_CHECK(grid.rows > 0 && grid.rows <= kMostRows, kConvOp, ": no launch can have ", grid.rows,
                  " blocks that share channels");
  return {static_cast<Vec2*>(partial.mutable_data_ptr()), counters, grid.rows, channels};
}

}  // namespace nasfast::gpu
