// What people take for a model file and is none.
#pragma once

#include <string>
#include <string_view>

namespace opst::model {

// What follows "is not a GGUF file" where `head` is the file's beginning: what the file is, where that is known.
std::string what_it_is(std::string_view head);

}  // namespace opst::model
