// OPST_TRY(call): returns from the function with the call's Status unless it is ok.
#pragma once

#include "opst/status.h"

#define OPST_TRY(call) \
  if (::opst::Status status_ = (call); !status_.ok()) return status_
