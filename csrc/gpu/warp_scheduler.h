// The barriers of an emulated block. Its warps take turns: each one runs until it waits at a barrier, and then the next
// one runs. So a warp is as far ahead of the others as it can be on a GPU, and a missing barrier shows.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

namespace nasfast::gpu {

class WarpScheduler {
 public:
  // What the methods of Block share among its warps.
  std::vector<float> floats;
  bool last = false;

  WarpScheduler(int warps, bool backwards) : backwards_(backwards), warps_(warps) {
    for (Fiber& fiber : warps_) fiber.stack.reset(new char[kStack]);
  }

  // Runs f(warp) for every warp. Raises if a warp ends while another one waits: a GPU would never go on.
  void run(const std::function<void(int)>& f) {
    function_ = &f;
    floats.clear();
    for (Fiber& fiber : warps_) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &caller_;
      makecontext(&fiber.context, enter, 0);
    }
    const int count = static_cast<int>(warps_.size());
    for (ended_ = 0; ended_ == 0;) {
      for (int i = 0; i < count; ++i) {
        current_ = backwards_ ? count - 1 - i : i;
        running() = this;
        swapcontext(&caller_, &warps_[current_].context);
      }
    }
    if (ended_ != count) throw std::logic_error("the warps of an emulated block do not meet at the same barriers");
  }

  // Called by a warp: goes on when all have called it.
  void wait() { swapcontext(&warps_[current_].context, &caller_); }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
  };
  static constexpr size_t kStack = 1 << 20;

  static WarpScheduler*& running() {  // makecontext passes no pointer
    static thread_local WarpScheduler* scheduler = nullptr;
    return scheduler;
  }
  static void enter() {
    WarpScheduler& self = *running();
    (*self.function_)(self.current_);
    ++self.ended_;
  }

  bool backwards_;
  std::vector<Fiber> warps_;
  ucontext_t caller_;
  const std::function<void(int)>* function_ = nullptr;
  int current_ = 0, ended_ = 0;
};

}  // namespace nasfast::gpu
