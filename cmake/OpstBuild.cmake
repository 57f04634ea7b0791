# How a room adds its parts to the build:
#   opst_sources(attention.cc plan.cc)                 code for every processor
#   opst_kernels(SOURCE kernels_isa.cc FAMILY float)   the same file once per instruction set level of a family (below,
#                                                      and machine/levels.h); the objects join the library, or TARGET name
#   opst_test(attention_test SOURCES attention_test.cc LABELS attention)
#   opst_bench(attention_bench SOURCES attention_bench.cc)
#   opst_fuzz(gguf_fuzz SOURCES gguf_fuzz.cc LIBRARIES opst_model)

if(OPST_BENCH)
  add_custom_target(opst_benches)
endif()
if(OPST_FUZZ)
  add_custom_target(opst_fuzzers)
endif()

set(OPST_WARNINGS -Wall -Wextra -Wshadow -Wconversion)

function(opst_compile_options target)
  target_compile_options(${target} PRIVATE ${OPST_WARNINGS})
  if(OPST_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(OPST_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${OPST_SANITIZE} -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${OPST_SANITIZE})
    # g++ 12 at -O1 with TSan lays two live arrays of the generic level's f8 loads over each other: wrong values, in this
    # build alone (attention_byte_pages_test). With slots of their own, or at -O2, the values are right.
    if(OPST_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE -fstack-reuse=none)
    endif()
  endif()
endfunction()

function(opst_sources)
  foreach(source IN LISTS ARGN)
    target_sources(opst PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/${source})
  endforeach()
endfunction()

# Flags of each level: what Isa in include/opst/context.h promises, nothing more.
set(OPST_ISA_FLAGS_generic "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(OPST_ISA_LEVELS generic avx2 avx512 avx512_vnni avx512_bf16)
  set(OPST_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2)
  set(OPST_ISA_FLAGS_avx512 ${OPST_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd
      -mprefer-vector-width=512)
  set(OPST_ISA_FLAGS_avx512_vnni ${OPST_ISA_FLAGS_avx512} -mavx512vnni)
  set(OPST_ISA_FLAGS_avx512_bf16 ${OPST_ISA_FLAGS_avx512_vnni} -mavx512bf16)
else()
  set(OPST_ISA_LEVELS generic)
endif()
# Families of levels, by what kernels use: as in src/machine/levels.h, which levels_test compares.
set(OPST_FAMILY_float generic avx2 avx512)
set(OPST_FAMILY_bf16 ${OPST_FAMILY_float} avx512_bf16)
set(OPST_FAMILY_int8 ${OPST_FAMILY_float} avx512_vnni)
set(OPST_FAMILY_all ${OPST_FAMILY_float} avx512_vnni avx512_bf16)

# g++-12 warns about the deliberately undefined operands inside its own AVX-512 intrinsics.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(OPST_WARNINGS_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
  set(OPST_WARNINGS_avx512_vnni ${OPST_WARNINGS_avx512})
  set(OPST_WARNINGS_avx512_bf16 ${OPST_WARNINGS_avx512})
endif()

# Compiles SOURCE once for each level of FAMILY (or of LEVELS), with OPST_ISA_NS defined as the level's name: all kernel
# code lives in namespace opst::OPST_ISA_NS, so that the linker can never exchange code between levels.
function(opst_kernels)
  cmake_parse_arguments(ARG "" "SOURCE;TARGET;FAMILY" "LEVELS" ${ARGN})
  if(ARG_FAMILY AND NOT OPST_FAMILY_${ARG_FAMILY})
    message(FATAL_ERROR "opst_kernels(${ARG_SOURCE}): there is no family ${ARG_FAMILY}")
  endif()
  if(NOT ARG_TARGET)
    set(ARG_TARGET opst)
  endif()
  get_filename_component(room ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  get_filename_component(stem ${ARG_SOURCE} NAME_WE)
  foreach(level IN LISTS ARG_LEVELS OPST_FAMILY_${ARG_FAMILY})
    if(NOT level IN_LIST OPST_ISA_LEVELS)
      continue()
    endif()
    set(target opst_${room}_${stem}_${level})
    add_library(${target} OBJECT ${ARG_SOURCE})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    target_compile_definitions(${target} PRIVATE OPST_ISA_NS=${level} OPST_LEVEL_${level}=1)
    # What is fuzzed are readers, and instrumented kernels compile for an hour. Races do not depend on the level: the same
    # templates with other registers. So the thread sanitizer's tests run at avx2 (opst_test), and levels above only link.
    if(OPST_FUZZ OR (OPST_SANITIZE STREQUAL "thread" AND level MATCHES "avx512"))
      target_compile_options(${target} PRIVATE ${OPST_WARNINGS})
    else()
      opst_compile_options(${target})
    endif()
    # No contraction: where a multiply-add is one rounding, the code says fma.
    target_compile_options(${target} PRIVATE ${OPST_ISA_FLAGS_${level}} ${OPST_WARNINGS_${level}} -ffp-contract=off
                                             -fno-exceptions -fno-rtti)
    target_sources(${ARG_TARGET} PRIVATE $<TARGET_OBJECTS:${target}>)
    set_property(TARGET ${target} PROPERTY OPST_ISA_LEVEL ${level})
    set_property(GLOBAL APPEND PROPERTY OPST_KERNEL_TARGETS ${target})
  endforeach()
endfunction()

# One ctest entry per program. ctest calls it skipped only where every one of its cases was (see opst_test_main); skipped
# cases among others are listed by ./x test.
function(opst_test name)
  if(NOT OPST_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LABELS;LIBRARIES;ENVIRONMENT" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  if(OPST_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 6")
  endif()
  if(OPST_SANITIZE STREQUAL "thread")
    list(APPEND ARG_ENVIRONMENT OPST_ISA=avx2)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE opst opst_testing opst_test_main GTest::gtest Threads::Threads
                                        ${ARG_LIBRARIES})
  # Where reference data and the model are found.
  target_compile_definitions(${name} PRIVATE OPST_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  opst_compile_options(${name})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} SKIP_RETURN_CODE 77
                                          ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()

# Not part of "all": the target opst_benches builds them.
function(opst_bench name)
  if(NOT OPST_BENCH)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  find_package(benchmark REQUIRED)
  add_executable(${name} EXCLUDE_FROM_ALL ${ARG_SOURCES})
  add_dependencies(opst_benches ${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE opst opst_testing benchmark::benchmark)
  opst_compile_options(${name})
endfunction()

# libFuzzer targets, built by the preset fuzz alone, which instruments the library for them. ./x fuzz runs them all. Their
# corpus lies in fuzz/<name> beside the source; <name>_replay is the test that runs it.
function(opst_fuzz name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  opst_test(${name}_replay SOURCES ${ARG_SOURCES} ${PROJECT_SOURCE_DIR}/src/testing/replay_corpus_test.cc
            LIBRARIES ${ARG_LIBRARIES} LABELS ${ARG_LABELS}
            ENVIRONMENT OPST_CORPUS=${CMAKE_CURRENT_SOURCE_DIR}/fuzz/${name})
  if(NOT OPST_FUZZ)
    return()
  endif()
  add_executable(${name} EXCLUDE_FROM_ALL ${ARG_SOURCES})
  add_dependencies(opst_fuzzers ${name})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PRIVATE opst ${ARG_LIBRARIES})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  opst_compile_options(${name})
endfunction()
