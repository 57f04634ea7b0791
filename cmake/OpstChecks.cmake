# Checks of the tree and of the build itself, as tests: labels layers and install.

# Which object belongs to which instruction set level, for scripts/check_isa_objects.sh.
get_property(kernel_targets GLOBAL PROPERTY OPST_KERNEL_TARGETS)
set(objects "")
foreach(target IN LISTS kernel_targets)
  get_target_property(level ${target} OPST_ISA_LEVEL)
  string(APPEND objects "${level} $<JOIN:$<TARGET_OBJECTS:${target}>,\n${level} >\n")
endforeach()
file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/isa_objects.txt CONTENT "${objects}")

if(NOT OPST_TESTS)
  return()
endif()

add_test(NAME layers COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_layers.py)
add_test(NAME layers_self_test COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_layers.py --self-test)
set_tests_properties(layers layers_self_test PROPERTIES LABELS layers TIMEOUT 60)

if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT OPST_SANITIZE)
  add_test(NAME isa_objects
           COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_isa_objects.sh ${CMAKE_CURRENT_BINARY_DIR}/isa_objects.txt)
  add_test(NAME isa_objects_self_test COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_isa_objects.sh --self-test)
  set_tests_properties(isa_objects isa_objects_self_test PROPERTIES LABELS layers TIMEOUT 120)
  if(OPST_INSTALL)
    add_test(NAME consumer COMMAND ${PROJECT_SOURCE_DIR}/scripts/check_consumer.sh ${CMAKE_CURRENT_BINARY_DIR})
    set_tests_properties(consumer PROPERTIES LABELS install TIMEOUT 300)
  endif()
endif()
