// Model: a GGUF file, ready to answer.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "model/generate.h"
#include "model/gguf.h"
#include "model/llama.h"
#include "model/perplexity.h"
#include "model/prompt.h"
#include "model/tokenizer.h"
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

class Model {
 public:
  // The Context must outlive it (nb::keep_alive).
  Model(Context& context, const std::string& path, int64_t max_context)
      : file_(value_or_raise(model::GgufFile::open(path))),
        tokenizer_(value_or_raise(model::Tokenizer::from_gguf(file_))),
        weights_(value_or_raise(unlocked([&] { return model::LlamaModel::load(context, file_); }))),
        context_(context),
        options_(session_options(max_context)),
        sequence_(make_sequence()) {}
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  Ids tokenize(std::string_view text, bool parse_special) const {
    return value_or_raise(tokenizer_.encode(text, parse_special));
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

  Ids prompt_ids(std::string_view text) const { return value_or_raise(model::raw_prompt(tokenizer_, text, true)); }
  Ids chat_ids(const std::vector<std::pair<std::string, std::string>>& turns) const {
    std::vector<model::ChatMessage> messages;
    for (const auto& [role, content] : turns) messages.push_back({role, content});
    return value_or_raise(model::chat_prompt(file_, tokenizer_, messages));
  }

  nb::typed<nb::tuple, std::string, Ids, std::string> generate(const Ids& prompt, int64_t max_tokens, bool greedy,
                                                               int64_t top_k, double top_p, double temperature,
                                                               uint64_t seed, nb::object on_text) {
    model::GenerateOptions options;
    options.max_tokens = max_tokens;
    options.sampling = {.greedy = greedy, .top_k = top_k, .top_p = top_p, .temperature = temperature, .seed = seed};
    std::unique_ptr<nb::python_error> failure;
    const auto reader = [&](std::string_view piece) -> Status {
      const nb::gil_scoped_acquire acquired;
      try {
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (!on_text.is_none()) on_text(nb::str(piece.data(), piece.size()));
      } catch (nb::python_error& error) {
        failure = std::make_unique<nb::python_error>(std::move(error));
        return Status::internal("interrupted");
      }
      return {};
    };
    Sequence& sequence = this->sequence();
    Result<model::Generation> result = unlocked([&] {
      const std::lock_guard lock(sequence.mutex);
      sequence.session.reset();
      return model::generate(sequence.session, tokenizer_, prompt, options, reader);
    });
    if (failure) throw nb::python_error(std::move(*failure));
    const model::Generation generation = value_or_raise(std::move(result));
    return nb::make_tuple(generation.text, generation.tokens, to_string(generation.finish_reason));
  }

  // logits [tokens, vocab_size] f32
  void logits(const Ids& tokens, const View& out) {
    const Tensor y = out.output("logits");
    const int64_t rows = static_cast<int64_t>(tokens.size()), vocab = vocab_size();
    if (y.dtype != DType::f32 || y.rank != 2 || y.shape[0] != rows || y.shape[1] != vocab || !y.is_contiguous()) {
      raise(PyExc_ValueError, "logits must be a contiguous f32 [" + std::to_string(rows) + ", " +
                                  std::to_string(vocab) + "], not " + to_string(y));
    }
    Sequence& sequence = this->sequence();
    run([&] {
      const std::lock_guard lock(sequence.mutex);
      sequence.session.reset();
      return sequence.session.feed_all(tokens, [&](int64_t position, std::span<const float> row) {
        std::copy(row.begin(), row.end(), static_cast<float*>(y.data) + position * vocab);
      });
    });
  }

  double perplexity(const Ids& tokens) {
    Sequence& sequence = this->sequence();
    return value_or_raise(unlocked([&] {
             const std::lock_guard lock(sequence.mutex);
             sequence.session.reset();
             return model::measure_perplexity(sequence.session, tokens, {});
           }))
        .perplexity();
  }

  int64_t vocab_size() const { return weights_.config().vocab_size; }
  int64_t max_context() const { return options_.context; }
  int64_t weight_bytes() const { return weights_.weight_bytes(); }

 private:
  struct Sequence {
    explicit Sequence(model::LlamaSession s) : session(std::move(s)) {}
    model::LlamaSession session;
    std::mutex mutex;  // one sequence at a time
    pid_t process = getpid();
  };
  std::unique_ptr<Sequence> make_sequence() const {
    return std::make_unique<Sequence>(value_or_raise(model::LlamaSession::create(context_, weights_, options_)));
  }

  // With the interpreter's lock. In a forked child another thread of the parent may have been inside the sequence: it
  // stays locked there, and half written. The child leaves it to its fate and starts one of its own.
  Sequence& sequence() {
    if (sequence_->process != getpid()) {
      if (sequence_->mutex.try_lock()) {
        sequence_->mutex.unlock();
        sequence_->process = getpid();
      } else {
        std::unique_ptr<Sequence> fresh = make_sequence();
        (void)sequence_.release();
        sequence_ = std::move(fresh);
      }
    }
    return *sequence_;
  }

  model::SessionOptions session_options(int64_t max_context) const {
    model::SessionOptions options;
    options.context = max_context > 0 ? max_context : std::min(options.context, weights_.config().max_context);
    return options;
  }

  model::GgufFile file_;
  model::Tokenizer tokenizer_;
  model::LlamaModel weights_;
  Context& context_;
  const model::SessionOptions options_;
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace

void bind_model(nb::module_& module) {
  using nb::arg;
  nb::class_<Model>(module, "Model")
      .def(nb::init<Context&, const std::string&, int64_t>(), arg("context"), arg("path"), arg("max_context"),
           nb::keep_alive<1, 2>())
      .def("tokenize", &Model::tokenize, arg("text"), arg("parse_special"))
      .def("detokenize", &Model::detokenize, arg("tokens"))
      .def("prompt_ids", &Model::prompt_ids, arg("text"))
      .def("chat_ids", &Model::chat_ids, arg("turns"))
      .def("generate", &Model::generate, arg("prompt"), arg("max_tokens"), arg("greedy"), arg("top_k"), arg("top_p"),
           arg("temperature"), arg("seed"), arg("on_text").none())
      .def("logits", &Model::logits, arg("tokens"), arg("out"))
      .def("perplexity", &Model::perplexity, arg("tokens"))
      .def_prop_ro("vocab_size", &Model::vocab_size)
      .def_prop_ro("max_context", &Model::max_context)
      .def_prop_ro("weight_bytes", &Model::weight_bytes);
}

}  // namespace opst::python
