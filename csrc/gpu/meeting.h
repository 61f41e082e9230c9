// The barriers of an emulated block. Its warps take turns: each one runs until it waits at a barrier, and then the next
// one runs. So a warp is as far ahead of the others as it can be on a GPU, and a missing barrier shows.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

namespace nasfast::gpu {

class Meeting {
 public:
  // What the members of Block share among its warps.
  std::vector<float> floats;
  bool last = false;

  Meeting(int warps, bool backwards) : backwards_(backwards), warps_(warps) {
    for (Member& member : warps_) member.stack.reset(new char[kStack]);
  }

  // Runs f(warp) for every warp. Raises if a warp ends while another one waits: a GPU would never go on.
  void run(const std::function<void(int)>& f) {
    work_ = &f;
    floats.clear();
    for (Member& member : warps_) {
      getcontext(&member.context);
      member.context.uc_stack.ss_sp = member.stack.get();
      member.context.uc_stack.ss_size = kStack;
      member.context.uc_link = &outside_;
      makecontext(&member.context, enter, 0);
    }
    const int count = static_cast<int>(warps_.size());
    for (ended_ = 0; ended_ == 0;) {
      for (int i = 0; i < count; ++i) {
        current_ = backwards_ ? count - 1 - i : i;
        entered() = this;
        swapcontext(&outside_, &warps_[current_].context);
      }
    }
    if (ended_ != count) throw std::logic_error("the warps of an emulated block do not meet at the same barriers");
  }

  // Called by a warp: goes on when all have called it.
  void wait() { swapcontext(&warps_[current_].context, &outside_); }

 private:
  struct Member {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
  };
  static constexpr size_t kStack = 1 << 20;

  static Meeting*& entered() {  // makecontext passes no pointer
    static thread_local Meeting* meeting = nullptr;
    return meeting;
  }
  static void enter() {
    Meeting& self = *entered();
    (*self.work_)(self.current_);
    ++self.ended_;
  }

  bool backwards_;
  std::vector<Member> warps_;
  ucontext_t outside_;
  const std::function<void(int)>* work_ = nullptr;
  int current_ = 0, ended_ = 0;
};

}  // namespace nasfast::gpu
