// Model: a GGUF file, ready to answer.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "model/conversation.h"
#include "model/generate.h"
#include "model/llama.h"
#include "model/model_file.h"
#include "model/perplexity.h"
#include "model/prompt.h"
#include "view.h"

namespace opst::python {

namespace {

using Ids = std::vector<int32_t>;

// Without the interpreter's lock.
template <class F>
auto unlocked(F&& call) {
  const nb::gil_scoped_release released;
  return call();
}

// One call at a time. Other threads wait; a call from within a call (an on_text) is refused, as it would wait for
// itself.
class Turns {
 public:
  // Held until its end. Made with the interpreter's lock, which it gives away while it waits.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(turns) {
      if (turns_.abandoned()) {
        raise(PyExc_RuntimeError,
              "another thread was in a call of this object when the process forked, so its state is "
              "lost in the child: make a new one");
      }
      if (turns_.holder_ == std::this_thread::get_id()) {
        raise(PyExc_RuntimeError,
              "this model is in a call already, whose on_text calls it again: call it when generate "
              "has returned, or give another Model");
      }
      unlocked([&] { turns_.mutex_.lock(); });
      turns_.holder_ = std::this_thread::get_id();
    }
    ~Turn() {
      turns_.holder_ = std::thread::id();
      turns_.mutex_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Turns& turns_;
  };

  // Whether a forked child finds a turn of a thread that it does not have: it will never end, and what it was at is
  // half written. With the interpreter's lock.
  bool abandoned() {
    if (process_ == getpid()) return false;
    if (!mutex_.try_lock()) return true;
    mutex_.unlock();
    process_ = getpid();
    return false;
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_ = std::thread::id();
  pid_t process_ = getpid();
};

// What Python has to say during a call that runs without the interpreter's lock: signals (Ctrl-C), and what on_text
// raises. rethrow() is for the end of the call.
class Listener {
 public:
  explicit Listener(nb::object on_text) : on_text_(std::move(on_text)) {}

  bool interrupted() {
    const nb::gil_scoped_acquire acquired;
    if (!failure_ && PyErr_CheckSignals() != 0) failure_ = std::make_unique<nb::python_error>();
    return failure_ != nullptr;
  }
  Status read(std::string_view piece) {
    const nb::gil_scoped_acquire acquired;
    try {
      if (!on_text_.is_none()) on_text_(nb::str(piece.data(), piece.size()));
    } catch (nb::python_error& error) {
      failure_ = std::make_unique<nb::python_error>(std::move(error));
      return Status::internal("interrupted");
    }
    return {};
  }
  void rethrow() {
    if (failure_) throw nb::python_error(std::move(*failure_));
  }

 private:
  nb::object on_text_;
  std::unique_ptr<nb::python_error> failure_;
};

// text, tokens, finish_reason
using Answer = nb::typed<nb::tuple, std::string, Ids, std::string>;

// Runs `call(read, interrupted)`, which gives a Result<Generation>, with all that a call from Python needs around it.
template <class F>
Answer answer(Turns& turns, nb::object on_text, F&& call) {
  const Turns::Turn turn(turns);
  Listener listener(std::move(on_text));
  Result<model::Generation> result = unlocked([&] {
    return call([&](std::string_view piece) { return listener.read(piece); }, [&] { return listener.interrupted(); });
  });
  listener.rethrow();
  const model::Generation generation = value_or_raise(std::move(result));
  return nb::make_tuple(generation.text, generation.tokens, to_string(generation.finish_reason));
}

class Model {
 public:
  // The Context must outlive it (nb::keep_alive).
  Model(Context& context, const nb::bytes& path, int64_t max_context, const std::string& kv_dtype,
        bool int8_activations)
      : Model(context, value_or_raise(model::ModelFile::open({path.c_str(), path.size()})), max_context, kv_dtype,
              int8_activations) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  Ids tokenize(std::string_view text, bool add_bos, bool parse_special) const {
    return value_or_raise(model::text_ids(tokenizer_, text, {.add_bos = add_bos, .parse_special = parse_special}));
  }

  nb::bytes detokenize(const Ids& ids) const {
    std::string text;
    for (const int32_t id : ids) {
      if (id < 0 || id >= tokenizer_.vocab_size()) {
        raise(PyExc_ValueError, "token " + std::to_string(id) + " is not in the vocabulary of " +
                                    std::to_string(tokenizer_.vocab_size()));
      }
      text += tokenizer_.piece(id);
    }
    return nb::bytes(text.data(), text.size());
  }

  Ids chat_ids(const std::vector<std::pair<std::string, std::string>>& turns) const {
    std::vector<model::ChatMessage> messages;
    for (const auto& [role, content] : turns) messages.push_back({role, content});
    return value_or_raise(chat_template().prompt(messages));
  }

  Answer generate(const Ids& prompt, int64_t max_tokens, bool greedy, int64_t top_k, double top_p, double temperature,
                  uint64_t seed, bool ignore_end, nb::object on_text) {
    model::GenerateOptions options;
    options.max_tokens = max_tokens;
    options.ignore_end = ignore_end;
    options.sampling = {.greedy = greedy, .top_k = top_k, .top_p = top_p, .temperature = temperature, .seed = seed};
    Sequence& sequence = this->sequence();
    return answer(sequence.turns, std::move(on_text), [&](const auto& read, const auto& interrupted) {
      return model::generate(sequence.session, tokenizer_, prompt, options, read, interrupted);
    });
  }

  // logits [tokens, vocab_size] f32
  void logits(const Ids& tokens, const View& out) {
    const Tensor y = out.output("logits");
    const int64_t rows = static_cast<int64_t>(tokens.size()), vocab = vocab_size();
    if (y.dtype != DType::f32 || y.rank != 2 || y.shape[0] != rows || y.shape[1] != vocab) {
      raise(PyExc_ValueError,
            "logits must be f32 [" + std::to_string(rows) + ", " + std::to_string(vocab) + "], not " + to_string(y));
    }
    if (rows == 0) return;
    Sequence& sequence = this->sequence();
    const Turns::Turn turn(sequence.turns);
    Listener listener{nb::none()};
    const Status status = unlocked([&] {
      sequence.session.reset();
      return sequence.session.feed_all(
          tokens,
          [&](int64_t position, std::span<const float> row) {
            float* to = static_cast<float*>(y.data) + position * y.strides[0];
            for (const float logit : row) {
              *to = logit;
              to += y.strides[1];
            }
          },
          [&] { return listener.interrupted(); });
    });
    listener.rethrow();
    raise_if_failed(status);
  }

  double perplexity(const Ids& tokens) {
    Sequence& sequence = this->sequence();
    const Turns::Turn turn(sequence.turns);
    Listener listener{nb::none()};
    Result<model::Perplexity> result = unlocked([&] {
      return model::measure_perplexity(sequence.session, tokens, {}, [&] { return listener.interrupted(); });
    });
    listener.rethrow();
    return value_or_raise(std::move(result)).perplexity();
  }

  int64_t vocab_size() const { return weights_.config().vocab_size; }
  int64_t max_context() const { return options_.context; }
  int64_t weight_bytes() const { return weights_.weight_bytes(); }
  int64_t kv_cache_bytes() const { return sequence_->session.kv_cache_bytes(); }

 private:
  friend class Conversation;

  // Of the file nothing is kept: it may be shortened or deleted afterwards.
  Model(Context& context, model::ModelFile file, int64_t max_context, const std::string& kv_dtype,
        bool int8_activations)
      : context_(&context),
        tokenizer_(std::move(file.tokenizer)),
        chat_template_(model::ChatTemplate::from_gguf(file.file, tokenizer_)),
        weights_(value_or_raise(unlocked([&] { return model::LlamaModel::load(context, file.file); }))),
        options_(session_options(max_context, kv_dtype, int8_activations)),
        sequence_(std::make_unique<Sequence>(make_session())) {}

  model::SessionOptions session_options(int64_t max_context, const std::string& kv_dtype, bool int8_activations) const {
    model::SessionOptions options;
    options.context = max_context > 0 ? max_context : std::min(options.context, weights_.config().max_context);
    if (const model::KvType* const type = model::find_kv_type(kv_dtype)) options.kv_dtype = type->dtype;
    if (int8_activations) options.activations = ActivationType::int8;
    return options;
  }
  struct Sequence {
    explicit Sequence(model::LlamaSession s) : session(std::move(s)) {}
    model::LlamaSession session;
    Turns turns;  // one at a time
  };
  model::LlamaSession make_session() const {
    return value_or_raise(model::LlamaSession::create(*context_, weights_, options_));
  }
  // With the interpreter's lock. A forked child leaves a sequence that another thread was in to its fate.
  Sequence& sequence() {
    if (sequence_->turns.abandoned()) {
      auto fresh = std::make_unique<Sequence>(make_session());
      (void)sequence_.release();
      sequence_ = std::move(fresh);
    }
    return *sequence_;
  }

  // Only a chat needs one, so only a chat fails where the file's is not known.
  const model::ChatTemplate& chat_template() const {
    raise_if_failed(chat_template_.status());
    return chat_template_.value();
  }

  Context* context_;
  model::Tokenizer tokenizer_;
  Result<model::ChatTemplate> chat_template_;
  model::LlamaModel weights_;
  model::SessionOptions options_;
  std::unique_ptr<Sequence> sequence_;
};

// A session of its own, with its own cache, beside the model's.
class Conversation {
 public:
  // The model must outlive it (nb::keep_alive).
  Conversation(Model& model, std::optional<std::string> system, bool greedy, int64_t top_k, double top_p,
               double temperature, uint64_t seed)
      : session_(model.make_session()),
        conversation_(value_or_raise(model::Conversation::create(
            session_, model.tokenizer_, model.chat_template(), std::move(system),
            {.greedy = greedy, .top_k = top_k, .top_p = top_p, .temperature = temperature, .seed = seed}))) {}
  Conversation(const Conversation&) = delete;
  Conversation& operator=(const Conversation&) = delete;

  Answer answer_to(const std::string& message, int64_t max_tokens, nb::object on_text) {
    return answer(turns_, std::move(on_text), [&](const auto& read, const auto& interrupted) {
      return conversation_.answer(message, max_tokens, read, interrupted);
    });
  }
  void reset() {
    const Turns::Turn turn(turns_);
    conversation_.reset();
  }
  int64_t tokens() const { return conversation_.tokens(); }
  int64_t max_context() const { return session_.context(); }

 private:
  model::LlamaSession session_;
  model::Conversation conversation_;
  Turns turns_;
};

}  // namespace

void bind_model(nb::module_& module) {
  using nb::arg;
  nb::class_<Model>(module, "Model")
      .def(nb::init<Context&, const nb::bytes&, int64_t, const std::string&, bool>(), arg("context"), arg("path"),
           arg("max_context"), arg("kv_dtype"), arg("int8_activations"), nb::keep_alive<1, 2>())
      .def("tokenize", &Model::tokenize, arg("text"), arg("add_bos"), arg("parse_special"))
      .def("detokenize", &Model::detokenize, arg("tokens"))
      .def("chat_ids", &Model::chat_ids, arg("turns"))
      .def("generate", &Model::generate, arg("prompt"), arg("max_tokens"), arg("greedy"), arg("top_k"), arg("top_p"),
           arg("temperature"), arg("seed"), arg("ignore_end"), arg("on_text").none())
      .def("logits", &Model::logits, arg("tokens"), arg("out"))
      .def("perplexity", &Model::perplexity, arg("tokens"))
      .def_prop_ro("vocab_size", &Model::vocab_size)
      .def_prop_ro("max_context", &Model::max_context)
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("kv_cache_bytes", &Model::kv_cache_bytes);
  nb::class_<Conversation>(module, "Conversation")
      .def(nb::init<Model&, std::optional<std::string>, bool, int64_t, double, double, uint64_t>(), arg("model"),
           arg("system").none(), arg("greedy"), arg("top_k"), arg("top_p"), arg("temperature"), arg("seed"),
           nb::keep_alive<1, 2>())
      .def("answer", &Conversation::answer_to, arg("message"), arg("max_tokens"), arg("on_text").none())
      .def("reset", &Conversation::reset)
      .def_prop_ro("tokens", &Conversation::tokens)
      .def_prop_ro("max_context", &Conversation::max_context);
}

}  // namespace opst::python
