# Defaults that let a plain `cmake -B build && cmake --build build` need nothing but a compiler.
#
# OPST_TOOLS_DEFAULT and OPST_TESTS_DEFAULT are ON in a build of opst itself where the packages are there, else OFF, and
# a line says what was not found. An option that the user sets is never changed: then a missing package is an error.

# Without a build type compilers do not optimise at all, and kernels are nothing without -O. This holds for opst as a
# part of another project too (FetchContent, add_subdirectory): an ordinary variable reaches the targets of this folder
# and of those below it, not the project around them.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  else()
    message(STATUS "opst: CMAKE_BUILD_TYPE is empty, so opst alone is built as Release")
    set(CMAKE_BUILD_TYPE Release)
  endif()
endif()

# opst_default(OPTION WHAT PACKAGES...): OPTION_DEFAULT is ON where all packages are there; a line names those missing.
function(opst_default option what)
  set(${option}_DEFAULT OFF PARENT_SCOPE)
  if(NOT PROJECT_IS_TOP_LEVEL)
    return()
  endif()
  set(missing "")
  foreach(package IN LISTS ARGN)
    if(package STREQUAL "utf8proc")
      find_library(UTF8PROC_LIBRARY utf8proc)
      find_path(UTF8PROC_INCLUDE_DIR utf8proc.h)
      set(found ${UTF8PROC_LIBRARY})
    elseif(package STREQUAL "Random123")
      find_path(RANDOM123_INCLUDE_DIR Random123/philox.h)
      set(found ${RANDOM123_INCLUDE_DIR})
    else()
      find_package(${package} QUIET)
      set(found ${${package}_FOUND})
    endif()
    if(NOT found)
      list(APPEND missing ${package})
    endif()
  endforeach()
  if(NOT missing)
    set(${option}_DEFAULT ON PARENT_SCOPE)
  elseif(NOT DEFINED ${option})
    list(JOIN missing ", " names)
    message(STATUS "opst: ${what} not built (${option}=OFF), since these packages were not found: ${names}")
  endif()
endfunction()

opst_default(OPST_TOOLS "the program is" CLI11 nlohmann_json utf8proc)
opst_default(OPST_TESTS "the tests are" GTest Random123)
