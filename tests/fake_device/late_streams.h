/* Streams that run late. Work that is put on a stream is carried out when something that is waited for forces it, or at
 * another time that events allow: what no event orders is done in an order that shows it. Orders:
 *
 *   AT_ONCE     work is carried out when it is given: a device is never behind
 *   LATE        only what a wait of the host needs, no sooner: whoever reads before the wait reads old values
 *   SIDE_FIRST  so is the default stream; others run ahead, as far as their events let them: whoever writes too early
 *               is seen by work of the default stream that was given before
 *   RANDOM      each stream runs ahead as far as a random number lets it, other numbers for another seed
 *
 * One lock is held while work is carried out. Work calls no Python, so that who holds Python's lock may wait for this one.
 */
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

namespace late {

enum class Order : int { AT_ONCE, LATE, SIDE_FIRST, RANDOM };

using Place = std::pair<int, int64_t>;  // a device and its stream; 0 is the default stream

struct Point {  // all that a stream was given by then
  Place place;
  uint64_t count;
};

class Streams {
 public:
  bool are_late() const { return order_ != Order::AT_ONCE; }

  /* Carry out all that is left, and follow another order from now on. */
  void follow(Order order, uint32_t seed) {
    const Held held(lock_);
    finish();
    order_ = order;
    random_.seed(seed);
    for (auto& [place, one] : streams_) one.eagerness = draw_eagerness(place.second == 0);
  }

  Point now(Place place) {
    const Held held(lock_);
    return {place, stream(place).given};
  }

  /* Put work on a stream, behind what that has, and behind points of others. */
  void give(Place place, std::function<void()> run, std::vector<Point> behind = {}) {
    if (!are_late()) return run ? run() : void();
    const Held held(lock_);
    auto& to = stream(place);
    to.queue.push_back({std::move(run), std::move(behind)});
    ++to.given;
    run_ahead();
  }

  /* Carry out what a point needs. */
  void reach(const Point& point) {
    const Held held(lock_);
    run_ahead();
    carry_out(point);
  }

  void reach(Place place) { reach(now(place)); }

  bool is_reached(const Point& point) {
    const Held held(lock_);
    run_ahead();
    return stream(point.place).done >= point.count;
  }

  /* Carry out all that a device was given. */
  void reach_all(int device) {
    const Held held(lock_);
    for (auto& [place, one] : streams_)
      if (place.first == device) carry_out({place, one.given});
  }

  void finish() {
    const Held held(lock_);
    for (auto& [place, one] : streams_) carry_out({place, one.given});
  }

 private:
  using Held = std::lock_guard<std::recursive_mutex>;

  struct Work {
    std::function<void()> run;
    std::vector<Point> behind;
  };

  struct Stream {
    std::deque<Work> queue;
    uint64_t done = 0, given = 0;
    double eagerness = 0;
  };

  Stream& stream(Place place) {
    const auto [found, is_new] = streams_.try_emplace(place);
    if (is_new) found->second.eagerness = draw_eagerness(place.second == 0);
    return found->second;
  }

  double draw_eagerness(bool is_default) {
    constexpr double drawn[] = {0.0, 0.02, 0.1, 0.5, 1.0};
    if (order_ == Order::RANDOM) return drawn[random_() % 5];
    return order_ == Order::SIDE_FIRST && !is_default ? 1.0 : 0.0;
  }

  void carry_out(const Point& point) {
    auto& from = stream(point.place);
    while (from.done < point.count) {
      for (const auto& other : from.queue.front().behind) carry_out(other);
      run_first(from);
    }
  }

  void run_first(Stream& from) {
    const auto work = std::move(from.queue.front());
    from.queue.pop_front();
    ++from.done;
    if (work.run) work.run();
  }

  bool can_run(const Stream& one) {
    if (one.queue.empty()) return false;
    for (const auto& other : one.queue.front().behind)
      if (stream(other.place).done < other.count) return false;
    return true;
  }

  /* Let streams do what nobody waits for. */
  void run_ahead() {
    std::uniform_real_distribution<double> draw(0, 1);
    for (bool has_run = order_ != Order::LATE; has_run;) {
      has_run = false;
      for (auto& [place, one] : streams_)
        while (one.eagerness > 0 && can_run(one) && (one.eagerness == 1 || draw(random_) < one.eagerness)) {
          run_first(one);
          has_run = true;
        }
    }
  }

  std::atomic<Order> order_{Order::AT_ONCE};
  std::recursive_mutex lock_;
  std::map<Place, Stream> streams_;
  std::mt19937 random_;
};

inline Streams& streams = *new Streams;  // lives as long as the process: what it holds is freed at its end

}  // namespace late
